"""Who is computed in the next step: continuous batching, first come first served. Plain Python.

Two orders hold at all times: whoever runs came before whoever waits, and the running are kept in order of arrival. So
the youngest is always the last one, and making room for a sequence never hurts an older one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from verl.inference.block_manager import BlockManager
from verl.inference.constraints import masks_of
from verl.inference.sequence import Sequence, accept_details, accept_experts, accept_tokens
from verl.inference.step_plan import Prefill, StepDetails, StepExperts, StepPlan, banned_tokens
from verl.types.request import Request, check_request

__all__ = ["Scheduler"]

# While the queue is long, slots are refilled in this many goes.
_ADMISSIONS_PER_ROUND = 16


class Scheduler:
    """Plans steps and takes their results.

    `schedule` may run ahead of `settle`: a sequence is planned on while its last token is known to the device only.
    A step computes at most `max_num_batched_tokens` tokens. With `chunked_prefill` the running sequences are decoded in
    every step and prompts are cut to fill it up; without, a step either decodes or computes whole prompts (cut only if
    longer than a step). With `returns_experts`, steps return the experts of every forward pass that samples.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        chunked_prefill: bool = True,
        returns_experts: bool = False,
    ) -> None:
        self._returns_experts = returns_experts
        self.blocks = block_manager
        self._max_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._chunked_prefill = chunked_prefill
        # No more than can be decoded in one step.
        slots = min(max_num_seqs, max_num_batched_tokens)
        self._free_slots = list(range(slots - 1, -1, -1))
        self._admitted_together = max(1, slots // _ADMISSIONS_PER_ROUND)
        # May hold sequences that are done meanwhile; they are dropped when they reach the head.
        self._waiting: deque[Sequence] = deque()
        self._decoding: dict[Sequence, None] = {}
        # The one whose prompt is computed in part; nobody is admitted before it is whole.
        self._prefilling: Sequence | None = None
        self._launched: deque[_Launched] = deque()
        # Of the step that is being planned: who samples its last token.
        self._ending: list[Sequence] = []
        # What only some sequences ask for; the others shall not pay for it.
        self._with_minimum = 0
        self._with_stop = 0
        self._with_grammar = 0
        self._with_details = 0
        # Of the step that is being planned: whose prompts get log-probs, in the order of the prefills with targets.
        self._scored: list[Sequence] = []
        # Every token that ends an answer of anybody who ever came.
        self._ends: set[int] = set()

    # ---------------------------------------------------------------- coming and going

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that can never be answered here."""
        check_request(request, self._max_model_len, grammars=True)
        length = min(len(request.prompt_ids) + request.params.max_new_tokens, self._max_model_len)
        # The last token is sampled and never fed.
        needed, there_are = self.blocks.blocks_for(length - 1), self.blocks.num_blocks
        if needed > there_are:
            raise ValueError(
                f"request {request.id!r}: {len(request.prompt_ids)} prompt and {request.params.max_new_tokens} new"
                f" tokens need {needed} KV blocks of {self.blocks.block_size} tokens, and there are {there_are}."
                " Raise gpu_memory_utilization, or lower max_new_tokens."
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue them, in order: all or, if one is impossible, none."""
        arriving = list(sequences)
        for sequence in arriving:
            self.check(sequence.request)
            if sequence.params.stop and sequence.stop_check is None:
                raise ValueError(f"request {sequence.request.id!r}: stop strings need a tokenizer. Set stop_token_ids.")
            if sequence.params.grammar is not None and sequence.grammar is None:
                raise ValueError(f"request {sequence.request.id!r}: a grammar needs a tokenizer. Leave it out.")
        for sequence in arriving:
            sequence.max_length = min(sequence.max_length, self._max_model_len)
            self._with_minimum += sequence.params.min_new_tokens > 0
            self._with_stop += sequence.stop_check is not None
            self._with_grammar += sequence.grammar is not None
            self._with_details += _is_detailed(sequence)
            self._ends |= sequence.ends
            self._waiting.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Forget them, wherever they are; what is in flight for them is ignored."""
        for sequence in sequences:
            if not sequence.done:
                self._leave(sequence)

    def requeue_all(self) -> None:
        """All KV is void: running sequences go back to the head of the queue, in order, and nothing is cached."""
        self.blocks.flush()
        while self._running_count():
            self._preempt_youngest()

    def clear(self) -> None:
        """Forget everybody, and every step that was launched."""
        self.requeue_all()
        self.remove(self._waiting)
        self._waiting.clear()
        self._launched.clear()

    @property
    def has_work(self) -> bool:
        """Somebody is unfinished."""
        return bool(self._decoding) or self._prefilling is not None or self._head() is not None

    # ---------------------------------------------------------------- a step

    def schedule(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute before earlier steps are settled."""
        plan = StepPlan(returns_experts=self._returns_experts)
        self._ending, self._scored = [], []
        if self._chunked_prefill:
            decoded, made_room = self._plan_decodes(plan)
            rows = self._plan_prefills(plan, self._max_batched_tokens - len(decoded), admit=not made_room)
            rows += decoded
        else:
            rows = self._plan_prefills(plan, self._max_batched_tokens, admit=True)
            if not plan.prefills:
                rows, _ = self._plan_decodes(plan)
        if not plan.prefills and not plan.decodes:
            return None
        plan.sample_slots += plan.decodes
        plan.sample_positions += [position + 1 for position in plan.positions]
        if self._with_minimum:
            placed = zip(rows, plan.sample_positions, strict=True)
            plan.banned = banned_tokens((row, s.params, at - len(s.prompt_ids)) for row, (s, at) in enumerate(placed))
        if self._with_grammar:
            plan.masks = masks_of(sequence.grammar for sequence in rows)
        if self._with_details:
            plan.top_rows = [(row, s.params.top_log_probs) for row, s in enumerate(rows) if s.params.top_log_probs]
            plan.detailed = bool(plan.top_rows or self._scored)
        self._launched.append(_Launched(plan, rows, self._ending, self._scored))
        return plan

    def settle(
        self,
        plan: StepPlan,
        tokens: list[int],
        log_probs: list[float],
        raw: list[float],
        sampled: list[float],
        version: int,
        details: StepDetails | None = None,
        experts: StepExperts | None = None,
    ) -> list[Sequence]:
        """Take a step's results, in the order of `sample_slots`; steps come in the order they were scheduled.

        Returns who is finished, also with an `error`: a row whose results are not finite ends alone. Rows of sequences
        that were found finished or were removed meanwhile are ignored.
        """
        launched = self._launched.popleft()
        assert launched.plan is plan, "steps are settled in the order they were scheduled"
        if details is not None:
            accept_details(plan, launched.rows, launched.scored, details)
        if experts is not None:
            accept_experts(plan, launched.rows, experts)
        finished = accept_tokens(launched.rows, tokens, log_probs, raw, sampled, version)
        for sequence in finished:  # with an error: their results are not finite
            self._leave(sequence)
        if self._with_grammar:
            launched.ending += _follow_grammars(launched.rows)
        for sequence in self._candidates(launched, tokens):
            if not sequence.done and sequence.is_finished():
                finished.append(sequence)
                self._leave(sequence)
        return finished

    def _candidates(self, launched: _Launched, tokens: list[int]) -> list[Sequence]:
        """Who may be finished by these tokens: few, and found without a look at every sequence."""
        candidates = launched.ending
        ends = self._ends
        if not ends.isdisjoint(tokens):
            candidates += [s for s, token in zip(launched.rows, tokens, strict=True) if token in ends]
        if self._with_stop:
            candidates += [sequence for sequence in launched.rows if sequence.stop_check is not None]
        return candidates

    # ---------------------------------------------------------------- decodes

    def _plan_decodes(self, plan: StepPlan) -> tuple[list[Sequence], bool]:
        """Feed every running sequence its last token, the oldest first. Returns them, and whether others had to go."""
        decoded: list[Sequence] = []
        positions, size = plan.positions, self.blocks.block_size
        made_room = False
        for sequence in self._decodable():
            position = sequence.computed
            if position >= sequence.look_at:
                if sequence.slot < 0:
                    break  # It had to give way, and so had everybody after it.
                if position + 2 > sequence.max_length:
                    continue  # Its last token is in flight.
                if position == len(sequence.block_table) * size:
                    if not self.blocks.free_blocks:
                        made_room = True
                        self._make_room(sequence)
                        if sequence.slot < 0:
                            break
                    plan.block_updates.append((sequence.slot, position // size, self.blocks.append(sequence)))
                    self._look_later(sequence)
                if position + 2 == sequence.max_length:
                    self._ending.append(sequence)
            sequence.computed = position + 1
            sequence.in_flight += 1
            positions.append(position)
            decoded.append(sequence)
        plan.decodes = [sequence.slot for sequence in decoded]
        return decoded, made_room

    def _decodable(self) -> list[Sequence]:
        """Those that run, but for whoever has a grammar and a token in flight: what may follow that is not known."""
        if not self._with_grammar:
            return list(self._decoding)
        return [sequence for sequence in self._decoding if sequence.grammar is None or not sequence.in_flight]

    def _look_later(self, sequence: Sequence) -> None:
        """It is decoded without a further look until its blocks are full, or its last token is to be sampled."""
        sequence.look_at = min(len(sequence.block_table) * self.blocks.block_size, sequence.max_length - 2)

    def _make_room(self, sequence: Sequence) -> None:
        """Send the youngest back to the queue until a block is free, if need be the sequence itself."""
        while sequence.slot >= 0 and not self.blocks.free_blocks:
            self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        """Back to the head of the queue; its KV will be computed again, from the tokens it has."""
        sequence, self._prefilling = self._prefilling, None
        if sequence is None:
            sequence, _ = self._decoding.popitem()
        sequence.output.preemptions += 1
        self._vacate(sequence)
        self._waiting.appendleft(sequence)

    # ---------------------------------------------------------------- prefills

    def _plan_prefills(self, plan: StepPlan, budget: int, admit: bool) -> list[Sequence]:
        """Go on with the prompt that was cut, then admit from the queue while there are tokens, slots and blocks.

        Returns who samples, in the order of `sample_slots`.
        """
        pieces: list[_Piece] = []
        # Pieces that end in this step, by group: sequences with the same tokens sample from their last position.
        shared: dict[str, _Piece] = {}
        if self._prefilling is not None and budget > 0:
            budget -= self._plan_piece(self._prefilling, budget, pieces, shared)
        admit = admit and self._is_worth_admitting()
        while admit and self._prefilling is None and self._free_slots:
            sequence = self._head()
            # One that was sent back may have a token in flight: it goes on when that is known.
            if sequence is None or sequence.in_flight:
                break
            piece = None if sequence.params.prompt_log_probs else shared.get(sequence.request.group)
            if piece is not None and piece.samplers[0].token_ids == sequence.token_ids:
                if self.blocks.free_blocks <= self._running_count():
                    break
                plan.copies_after += self.blocks.fork(piece.samplers[0], sequence)
                self._take_slot(sequence, plan)
                self._sample_from(piece, sequence)
                continue
            whole = self._chunked_prefill or not pieces or len(sequence.token_ids) <= budget
            if budget <= 0 or not whole or not self.blocks.can_allocate(sequence, self._running_count()):
                break
            self.blocks.allocate(sequence)
            self._take_slot(sequence, plan)
            budget -= self._plan_piece(sequence, budget, pieces, shared)
        return _sampling_rows(plan, pieces)

    def _is_worth_admitting(self) -> bool:
        """A step with a prompt takes longer than a decode: while more wait than find a place, a few go together."""
        free = len(self._free_slots)
        return not self._decoding or free >= self._admitted_together or free >= len(self._waiting)

    def _take_slot(self, sequence: Sequence, plan: StepPlan) -> None:
        """Move the head of the queue, which has its blocks, into the batch."""
        self._waiting.popleft()
        slot = sequence.slot = self._free_slots.pop()
        self._look_later(sequence)
        plan.new_params.append((slot, sequence.params))
        if sequence.params.penalised:
            plan.histories.append((slot, len(sequence.prompt_ids), sequence.token_ids))
        plan.block_updates += [(slot, column, block) for column, block in enumerate(sequence.block_table)]

    def _plan_piece(self, sequence: Sequence, budget: int, pieces: list[_Piece], shared: dict[str, _Piece]) -> int:
        """Compute as many of the sequence's tokens as the budget allows; returns how many."""
        start = sequence.computed
        token_ids = sequence.token_ids[start : start + budget]
        sequence.computed = start + len(token_ids)
        # Whoever is admitted after it in this very step may read its blocks: a layer's KV is written before it is read.
        self.blocks.remember(sequence)
        piece = _Piece(Prefill(sequence.slot, start, token_ids, []), [])
        pieces.append(piece)
        if sequence.params.prompt_log_probs:
            piece.prefill.targets = sequence.prompt_ids[start + 1 : start + 1 + len(token_ids)]
            piece.prefill.top = sequence.params.top_log_probs
            if piece.prefill.targets:
                self._scored.append(sequence)
        if sequence.computed < len(sequence.token_ids):
            self._prefilling = sequence
            return len(token_ids)
        self._prefilling = None
        self._sample_from(piece, sequence)
        if sequence.request.group:
            shared[sequence.request.group] = piece
        return len(token_ids)

    def _sample_from(self, piece: _Piece, sequence: Sequence) -> None:
        """All of the sequence's tokens are computed with this step: it samples, and is decoded from the next one on."""
        if self._returns_experts and not sequence.experts:
            piece.prefill.context_experts = len(sequence.token_ids) - 1
        piece.prefill.samples.append(sequence.slot)
        piece.samplers.append(sequence)
        sequence.in_flight += 1
        self._decoding[sequence] = None
        if len(sequence.token_ids) + 1 >= sequence.max_length:
            self._ending.append(sequence)

    # ---------------------------------------------------------------- bookkeeping

    def _head(self) -> Sequence | None:
        """Who is next in the queue."""
        waiting = self._waiting
        while waiting and waiting[0].done:
            waiting.popleft()
        return waiting[0] if waiting else None

    def _running_count(self) -> int:
        """Also the blocks an admission must leave free: one for each that runs, or it would be sent back at once."""
        return len(self._decoding) + (self._prefilling is not None)

    def _leave(self, sequence: Sequence) -> None:
        sequence.done = True
        if self._returns_experts:
            sequence.output.routed_experts = sequence.experts_since(0)
        self._with_minimum -= sequence.params.min_new_tokens > 0
        self._with_stop -= sequence.stop_check is not None
        self._with_grammar -= sequence.grammar is not None
        self._with_details -= _is_detailed(sequence)
        if sequence.slot >= 0:
            if sequence is self._prefilling:
                self._prefilling = None
            else:
                del self._decoding[sequence]
            self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self.blocks.deallocate(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.look_at = 0


@dataclass(slots=True)
class _Launched:
    """A step that was planned and not settled: who samples, in the order of `sample_slots`, and whose last token."""

    plan: StepPlan
    rows: list[Sequence]
    ending: list[Sequence]
    scored: list[Sequence]


@dataclass(slots=True)
class _Piece:
    """A prefill of the step, and who samples from its end: the sequence itself, then those forked from it."""

    prefill: Prefill
    samplers: list[Sequence]


def _sampling_rows(plan: StepPlan, pieces: list[_Piece]) -> list[Sequence]:
    """Write the pieces into the plan; returns who samples, in order."""
    rows: list[Sequence] = []
    for piece in pieces:
        prefill = piece.prefill
        plan.prefills.append(prefill)
        plan.sample_slots += prefill.samples
        plan.sample_positions += [prefill.start + len(prefill.token_ids)] * len(prefill.samples)
        rows += piece.samplers
    return rows


def _follow_grammars(rows: list[Sequence]) -> list[Sequence]:
    """Tell each grammar the token that its sequence was given; returns whose answers are whole."""
    following = [sequence for sequence in rows if sequence.grammar is not None and not sequence.done]
    for sequence in following:
        assert sequence.grammar is not None
        sequence.grammar.accept(sequence.token_ids[-1])
    return [sequence for sequence in following if sequence.grammar is not None and sequence.grammar.complete]


def _is_detailed(sequence: Sequence) -> bool:
    return sequence.params.top_log_probs > 0 or sequence.params.prompt_log_probs
