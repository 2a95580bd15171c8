"""Scheduler: continuous batching, first come first served. Plain Python, no torch.

Two invariants: running sequences arrived before waiting ones, and running sequences are kept in order of arrival. So
the youngest is always the last one, and freeing blocks for a sequence never preempts an older one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from verl.inference.block_manager import BlockManager
from verl.inference.constraints import token_masks
from verl.inference.sequence import Sequence, accept_details, accept_experts, accept_tokens, advance_grammars
from verl.inference.step_plan import Prefill, StepDetails, StepExperts, StepPlan, banned_tokens
from verl.types.request import Request, check_request

__all__ = ["Scheduler"]

# A long queue is admitted in groups of at least 1 / 16 of all slots.
_SLOTS_PER_ADMISSION = 16


class Scheduler:
    """Plans steps and processes their results.

    `schedule` may run ahead of `postprocess`: a sequence is scheduled again while only the device knows its last token.
    A step computes at most `max_num_batched_tokens` tokens. With `chunked_prefill` the running sequences are decoded in
    every step and prompts are split to fill it up; without, a step either decodes or prefills whole prompts (split only
    if longer than a step). With `returns_experts`, steps return the experts of every forward pass that samples. With
    `selects_adapters`, each sequence has its own LoRA adapter or none.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        chunked_prefill: bool = True,
        returns_experts: bool = False,
        selects_adapters: bool = False,
    ) -> None:
        self._returns_experts, self._selects_adapters = returns_experts, selects_adapters
        self.blocks = block_manager
        self._max_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._chunked_prefill = chunked_prefill
        # All running sequences must fit into one step of decodes.
        slots = min(max_num_seqs, max_num_batched_tokens)
        self.free_slots = list(range(slots - 1, -1, -1))
        self._min_admissions = max(1, slots // _SLOTS_PER_ADMISSION)
        # May contain sequences that are done; they are dropped when they reach the head.
        self.waiting: deque[Sequence] = deque()
        self.decoding: dict[Sequence, None] = {}
        # The sequence with a partly computed prompt; no other is admitted before it is complete.
        self.prefilling: Sequence | None = None
        self._launched: deque[_ScheduledStep] = deque()
        self.num_preempted = 0
        """Preemptions so far because the KV cache was full."""
        # Of the step being planned: sequences that sample their last token.
        self._finishing: list[Sequence] = []
        # Number of unfinished sequences that use a feature: its work is skipped while the number is 0.
        self._num_with_min_tokens = 0
        self._num_with_stop = 0
        self._num_with_grammar = 0
        self._num_with_details = 0
        # Of the step being planned: sequences with prompt log-probs, in the order of the prefills with targets.
        self._prompt_scored: list[Sequence] = []
        # End tokens of all sequences ever added.
        self._end_token_ids: set[int] = set()

    # ---------------------------------------------------------------- adding and removing

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that exceeds the engine's limits."""
        check_request(request, self._max_model_len, grammars=True)
        length = min(len(request.prompt_ids) + request.params.max_new_tokens, self._max_model_len)
        # The last token is sampled and never fed back.
        needed, available = self.blocks.num_blocks_for(length - 1), self.blocks.num_blocks
        if needed > available:
            raise ValueError(
                f"request {request.id!r}: {len(request.prompt_ids)} prompt and {request.params.max_new_tokens} new"
                f" tokens need {needed} KV blocks of {self.blocks.block_size} tokens, but there are {available}."
                " Raise gpu_memory_utilization, or lower max_new_tokens."
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the sequences, in order: all, or none if one is invalid."""
        added = list(sequences)
        for sequence in added:
            self.check(sequence.request)
            if sequence.params.stop and sequence.stop_check is None:
                raise ValueError(f"request {sequence.request.id!r}: stop strings need a tokenizer. Set stop_token_ids.")
            if sequence.params.grammar is not None and sequence.grammar is None:
                raise ValueError(f"request {sequence.request.id!r}: a grammar needs a tokenizer. Remove it.")
        for sequence in added:
            sequence.max_length = min(sequence.max_length, self._max_model_len)
            self._num_with_min_tokens += sequence.params.min_new_tokens > 0
            self._num_with_stop += sequence.stop_check is not None
            self._num_with_grammar += sequence.grammar is not None
            self._num_with_details += sequence.wants_details
            self._end_token_ids |= sequence.end_token_ids
            self.waiting.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Drop waiting or running sequences; their tokens in flight are ignored."""
        for sequence in sequences:
            if not sequence.done:
                self._retire(sequence)

    def preempt_all(self) -> None:
        """Drop all KV: running sequences return to the head of the queue, in order, and the prefix cache is reset."""
        self.blocks.reset_prefix_cache()
        while self._num_running():
            self._preempt_youngest()

    def clear(self) -> None:
        """Drop all sequences and all launched steps."""
        self.preempt_all()
        self.remove(self.waiting)
        self.waiting.clear()
        self._launched.clear()

    @property
    def has_work(self) -> bool:
        """Whether there are unfinished sequences."""
        return bool(self.decoding) or self.prefilling is not None or self._next_waiting() is not None

    # ---------------------------------------------------------------- a step

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute before earlier results are processed."""
        plan = StepPlan(returns_experts=self._returns_experts)
        self._finishing, self._prompt_scored = [], []
        if self._chunked_prefill:
            decoded, preempted = self._plan_decodes(plan)
            rows = self._plan_prefills(plan, self._max_batched_tokens - len(decoded), admit=not preempted)
            rows += decoded
        else:
            rows = self._plan_prefills(plan, self._max_batched_tokens, admit=True)
            if not plan.prefills:
                rows, _ = self._plan_decodes(plan)
        if not plan.prefills and not plan.decode_slots:
            return None
        plan.sample_slots += plan.decode_slots
        plan.sample_positions += [position + 1 for position in plan.decode_positions]
        if self._num_with_min_tokens:
            placed = zip(rows, plan.sample_positions, strict=True)
            plan.banned = banned_tokens((row, s.params, at - len(s.prompt_ids)) for row, (s, at) in enumerate(placed))
        if self._num_with_grammar:
            plan.masks = token_masks(sequence.grammar for sequence in rows)
        if self._num_with_details:
            plan.top_rows = [(row, s.params.top_log_probs) for row, s in enumerate(rows) if s.params.top_log_probs]
            plan.detailed = bool(plan.top_rows or self._prompt_scored)
        self._launched.append(_ScheduledStep(plan, rows, self._finishing, self._prompt_scored))
        return plan

    def postprocess(
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
        """Process the results of the oldest unprocessed step, in the order of its `sample_slots`.

        Returns the finished sequences, including those with an `error`: a row with non-finite results fails alone. Rows
        of sequences that have finished or were removed meanwhile are ignored.
        """
        launched = self._launched.popleft()
        assert launched.plan is plan, "steps are processed in the order they were scheduled"
        if details is not None:
            accept_details(plan, launched.rows, launched.scored, details)
        if experts is not None:
            accept_experts(plan, launched.rows, experts)
        finished = accept_tokens(launched.rows, tokens, log_probs, raw, sampled, version)
        for sequence in finished:  # with an error: their results are not finite
            self._retire(sequence)
        if self._num_with_grammar:
            launched.finishing += advance_grammars(launched.rows)
        for sequence in self._possibly_finished(launched, tokens):
            if not sequence.done and sequence.is_finished():
                finished.append(sequence)
                self._retire(sequence)
        return finished

    def _possibly_finished(self, launched: _ScheduledStep, tokens: list[int]) -> list[Sequence]:
        """Sequences that these tokens may finish, without checking every sequence."""
        candidates = launched.finishing
        ends = self._end_token_ids
        if not ends.isdisjoint(tokens):
            candidates += [s for s, token in zip(launched.rows, tokens, strict=True) if token in ends]
        if self._num_with_stop:
            candidates += [sequence for sequence in launched.rows if sequence.stop_check is not None]
        return candidates

    # ---------------------------------------------------------------- decodes

    def _plan_decodes(self, plan: StepPlan) -> tuple[list[Sequence], bool]:
        """Decode every running sequence, oldest first. Returns them, and whether others were preempted."""
        decoded: list[Sequence] = []
        positions, size = plan.decode_positions, self.blocks.block_size
        preempted = False
        for sequence in self._decodable():
            position = sequence.num_computed_tokens
            if position >= sequence.next_check:
                if sequence.slot < 0:
                    break  # preempted, like all younger sequences
                if position + 2 > sequence.max_length:
                    continue  # its last token is in flight
                if position == len(sequence.block_table) * size:
                    if not self.blocks.free_blocks:
                        preempted = True
                        self._preempt_until_free(sequence)
                        if sequence.slot < 0:
                            break
                    plan.block_updates.append((sequence.slot, position // size, self.blocks.append(sequence)))
                    self._set_next_check(sequence)
                if position + 2 == sequence.max_length:
                    self._finishing.append(sequence)
            sequence.num_computed_tokens = position + 1
            sequence.in_flight += 1
            positions.append(position)
            decoded.append(sequence)
        plan.decode_slots = [sequence.slot for sequence in decoded]
        return decoded, preempted

    def _decodable(self) -> list[Sequence]:
        """Running sequences, except those with a grammar and a token in flight: their next mask is not known yet."""
        if not self._num_with_grammar:
            return list(self.decoding)
        return [sequence for sequence in self.decoding if sequence.grammar is None or not sequence.in_flight]

    def _set_next_check(self, sequence: Sequence) -> None:
        """Decode without further checks until the blocks are full or the last token is due."""
        sequence.next_check = min(len(sequence.block_table) * self.blocks.block_size, sequence.max_length - 2)

    def _preempt_until_free(self, sequence: Sequence) -> None:
        """Preempt the youngest sequences until a block is free, if necessary `sequence` itself."""
        while sequence.slot >= 0 and not self.blocks.free_blocks:
            self._preempt_youngest()
            self.num_preempted += 1

    def _preempt_youngest(self) -> None:
        """Return the youngest running sequence to the head of the queue; its KV will be recomputed from its tokens."""
        sequence, self.prefilling = self.prefilling, None
        if sequence is None:
            sequence, _ = self.decoding.popitem()
        sequence.output.preemptions += 1
        self._deallocate(sequence)
        self.waiting.appendleft(sequence)

    # ---------------------------------------------------------------- prefills

    def _plan_prefills(self, plan: StepPlan, budget: int, admit: bool) -> list[Sequence]:
        """Continue the partly computed prompt, then admit from the queue while tokens, slots and blocks are left.

        Returns the sequences that sample, in the order of `sample_slots`.
        """
        chunks: list[_PrefillChunk] = []
        # Chunks that complete a prompt, by group: sequences with the same tokens sample from the chunk's last position.
        shared: dict[str, _PrefillChunk] = {}
        if self.prefilling is not None and budget > 0:
            budget -= self._plan_chunk(self.prefilling, budget, chunks, shared)
        admit = admit and self._should_admit()
        while admit and self.prefilling is None and self.free_slots:
            sequence = self._next_waiting()
            # A preempted sequence may have a token in flight, which must be known before it continues.
            if sequence is None or sequence.in_flight:
                break
            chunk = None if sequence.params.prompt_log_probs else shared.get(sequence.request.group)
            if chunk is not None and _same_context(chunk.samplers[0], sequence):
                if self.blocks.free_blocks <= self._num_running():
                    break
                plan.block_copies += self.blocks.fork(chunk.samplers[0], sequence)
                self._admit(sequence, plan)
                self._sample_from(chunk, sequence)
                continue
            fits = self._chunked_prefill or not chunks or len(sequence.token_ids) <= budget
            if budget <= 0 or not fits or not self.blocks.can_allocate(sequence, self._num_running()):
                break
            self.blocks.allocate(sequence)
            self._admit(sequence, plan)
            budget -= self._plan_chunk(sequence, budget, chunks, shared)
        return _add_prefills(plan, chunks)

    def _should_admit(self) -> bool:
        """Whether to admit waiting sequences now: prefills slow a step down, so a long queue is admitted in groups."""
        free = len(self.free_slots)
        return not self.decoding or free >= self._min_admissions or free >= len(self.waiting)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> None:
        """Move the head of the queue, whose blocks are allocated, into a slot of the batch."""
        self.waiting.popleft()
        slot = sequence.slot = self.free_slots.pop()
        self._set_next_check(sequence)
        plan.new_params.append((slot, sequence.params))
        if self._selects_adapters:
            plan.new_adapters.append((slot, sequence.adapter.slot))
        if sequence.params.penalised:
            plan.histories.append((slot, len(sequence.prompt_ids), sequence.token_ids))
        plan.block_updates += [(slot, column, block) for column, block in enumerate(sequence.block_table)]

    def _plan_chunk(
        self, sequence: Sequence, budget: int, chunks: list[_PrefillChunk], shared: dict[str, _PrefillChunk]
    ) -> int:
        """Schedule as many of the sequence's tokens as the budget allows; returns their number."""
        start = sequence.num_computed_tokens
        token_ids = sequence.token_ids[start : start + budget]
        sequence.num_computed_tokens = start + len(token_ids)
        # Sequences admitted later in this step may share its blocks: each layer writes KV before it reads any.
        self.blocks.cache_full_blocks(sequence)
        chunk = _PrefillChunk(Prefill(sequence.slot, start, token_ids, []), [])
        chunks.append(chunk)
        if sequence.params.prompt_log_probs:
            chunk.prefill.targets = sequence.prompt_ids[start + 1 : start + 1 + len(token_ids)]
            chunk.prefill.top = sequence.params.top_log_probs
            if chunk.prefill.targets:
                self._prompt_scored.append(sequence)
        if sequence.num_computed_tokens < len(sequence.token_ids):
            self.prefilling = sequence
            return len(token_ids)
        self.prefilling = None
        self._sample_from(chunk, sequence)
        if sequence.request.group:
            shared[sequence.request.group] = chunk
        return len(token_ids)

    def _sample_from(self, chunk: _PrefillChunk, sequence: Sequence) -> None:
        """Let a sequence whose prefill this step completes sample from the chunk's end; later steps decode it."""
        if self._returns_experts and not sequence.experts:
            chunk.prefill.context_experts = len(sequence.token_ids) - 1
        chunk.prefill.samples.append(sequence.slot)
        chunk.samplers.append(sequence)
        sequence.in_flight += 1
        self.decoding[sequence] = None
        if len(sequence.token_ids) + 1 >= sequence.max_length:
            self._finishing.append(sequence)

    # ---------------------------------------------------------------- bookkeeping

    def _next_waiting(self) -> Sequence | None:
        """First unfinished sequence of the queue."""
        waiting = self.waiting
        while waiting and waiting[0].done:
            waiting.popleft()
        return waiting[0] if waiting else None

    def _num_running(self) -> int:
        """Number of running sequences. An admission leaves as many blocks free: each may soon need one."""
        return len(self.decoding) + (self.prefilling is not None)

    def _retire(self, sequence: Sequence) -> None:
        sequence.done = True
        if self._returns_experts:
            sequence.output.routed_experts = sequence.experts_since(0)
        self._num_with_min_tokens -= sequence.params.min_new_tokens > 0
        self._num_with_stop -= sequence.stop_check is not None
        self._num_with_grammar -= sequence.grammar is not None
        self._num_with_details -= sequence.wants_details
        if sequence.slot >= 0:
            if sequence is self.prefilling:
                self.prefilling = None
            else:
                del self.decoding[sequence]
            self._deallocate(sequence)

    def _deallocate(self, sequence: Sequence) -> None:
        self.blocks.deallocate(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.next_check = 0


@dataclass(slots=True)
class _ScheduledStep:
    """A step whose results are not processed yet. `rows`: the sequences that sample, in the order of `sample_slots`."""

    plan: StepPlan
    rows: list[Sequence]
    finishing: list[Sequence]
    scored: list[Sequence]


@dataclass(slots=True)
class _PrefillChunk:
    """A prefill of the step and the sequences that sample from its end: its own, then those forked from it."""

    prefill: Prefill
    samplers: list[Sequence]


def _same_context(one: Sequence, other: Sequence) -> bool:
    """Whether two sequences have equal KV."""
    return one.adapter == other.adapter and one.token_ids == other.token_ids


def _add_prefills(plan: StepPlan, chunks: list[_PrefillChunk]) -> list[Sequence]:
    """Write the chunks into the plan; returns the sequences that sample, in order."""
    rows: list[Sequence] = []
    for chunk in chunks:
        prefill = chunk.prefill
        plan.prefills.append(prefill)
        plan.sample_slots += prefill.samples
        plan.sample_positions += [prefill.start + len(prefill.token_ids)] * len(prefill.samples)
        rows += chunk.samplers
    return rows
