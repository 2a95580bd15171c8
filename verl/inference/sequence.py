"""Sequence: a request in progress, with its tokens, its slot in the batch and its KV blocks."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verl.inference.constraints import GrammarState
from verl.inference.step_plan import StepDetails, StepExperts, StepPlan
from verl.types.request import ExpertEntry, Output, Request, join_entries, join_pieces, split_entries

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "NO_ADAPTER",
    "Adapter",
    "Sequence",
    "StopCheck",
    "accept_details",
    "accept_experts",
    "accept_tokens",
    "advance_grammars",
]


class StopCheck(Protocol):
    """Detects stop strings."""

    def completed_by_last(self, token_ids: list[int]) -> bool:
        """Whether the last of the generated tokens completes one of the strings."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded LoRA adapter."""

    id: int
    """Unique among all adapters ever loaded: the KV of different adapters is not shared."""
    slot: int
    """Its slot in the model; -1: none."""


NO_ADAPTER = Adapter(0, -1)


class Sequence:
    """A request and its output so far. Compared and hashed by identity."""

    __slots__ = (
        "aborted",
        "adapter",
        "arrival",
        "block_table",
        "cached_blocks",
        "cached_content",
        "cached_epoch",
        "done",
        "end_token_ids",
        "error",
        "experts",
        "future",
        "grammar",
        "in_flight",
        "max_length",
        "min_length",
        "next_check",
        "num_computed_tokens",
        "output",
        "params",
        "prompt_ids",
        "request",
        "slot",
        "stop_check",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        arrival: int = 0,
        stop_check: StopCheck | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        earlier = request.resume_from or Output()
        count = len(earlier.token_ids)
        self.request = request
        self.params = request.params
        self.arrival = arrival
        """Order of arrival."""
        self.future: Future[Output] = Future()
        self.aborted = False
        self.adapter = NO_ADAPTER
        """Its LoRA adapter."""
        self.done = False
        """Finished or removed: its tokens in flight are ignored."""
        self.error: Exception | None = None
        """Why it failed; other sequences are not affected."""
        self.prompt_ids = list(request.prompt_ids)
        self.output = Output(list(earlier.token_ids), list(earlier.log_probs), list(earlier.versions))
        self.output.raw_log_probs = _padded(earlier.raw_log_probs, count)
        self.output.sampled_log_probs = _padded(earlier.sampled_log_probs, count)
        if self.params.top_log_probs:
            self.output.top_log_probs = [*earlier.top_log_probs, *([[]] * (count - len(earlier.top_log_probs)))]
        self.output.routed_experts = earlier.routed_experts
        self.experts: list[ExpertEntry] = split_entries(earlier.routed_experts, len(self.prompt_ids), count)
        """One entry per generated token, if the engine returns experts; appended before the token's version."""
        self.token_ids = self.prompt_ids + self.output.token_ids
        """Prompt and generated tokens, without tokens in flight."""
        self.in_flight = 0
        """Tokens sampled by launched steps which the host has not read yet."""
        self.end_token_ids = request.params.end_token_ids
        self.stop_check = stop_check
        self.grammar = grammar
        """State of its grammar after the tokens so far."""
        self.max_length = len(self.prompt_ids) + request.params.max_new_tokens
        """Number of tokens at which it ends; the scheduler lowers it to max_model_len."""
        self.min_length = len(self.prompt_ids) + request.params.min_new_tokens
        # Written by the scheduler and the block manager.
        self.slot = -1
        """Its row in the device's tables; -1: not running."""
        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache once the launched steps have run."""
        self.block_table: list[int] = []
        self.next_check = 0
        """Position up to which the scheduler decodes it without checking blocks and length."""
        # Its blocks in the prefix cache: their number, the content number of the last one, the epoch of the cache.
        self.cached_blocks = 0
        self.cached_content = 0
        self.cached_epoch = 0

    def __len__(self) -> int:
        """Number of tokens, including those in flight."""
        return len(self.token_ids) + self.in_flight

    @property
    def wants_details(self) -> bool:
        """Whether the request wants top log-probs or prompt log-probs."""
        return self.params.top_log_probs > 0 or self.params.prompt_log_probs

    def experts_since(self, position: int, end: int | None = None) -> np.ndarray | None:
        """Experts [tokens, layers, k] recorded with generated tokens `position` to `end`; None: not recorded."""
        return join_entries(self.experts[position:end], len(self.prompt_ids), position)

    def is_finished(self) -> bool:
        """Whether the newest token is the last one; if so, sets the finish reason."""
        if self.token_ids[-1] in self.end_token_ids or self._completes_a_stop_string():
            self.output.finish_reason = "stop"
            return True
        if self.grammar is not None and self.grammar.complete:
            if self.grammar.error is not None:
                self.error = ValueError(f"request {self.request.id!r}: grammar: {self.grammar.error}. Simplify it.")
            self.output.finish_reason = "stop"
            return True
        if len(self.token_ids) >= self.max_length:
            self.output.finish_reason = "length"
            return True
        return False

    def _completes_a_stop_string(self) -> bool:
        if self.stop_check is None or len(self.token_ids) < self.min_length:
            return False
        return self.stop_check.completed_by_last(self.output.token_ids)


def accept_tokens(
    rows: list[Sequence],
    tokens: list[int],
    log_probs: list[float],
    raw_log_probs: list[float],
    sampled_log_probs: list[float],
    version: int,
) -> list[Sequence]:
    """Append the sampled tokens to their sequences; sequences that are done are skipped.

    Returns the sequences with a non-finite log-prob: they get an `error` instead of the token. The others are not
    affected.
    """
    # Cheap check of the common case: a sum is not finite if any summand is not.
    if not math.isfinite(sum(log_probs) + sum(raw_log_probs) + sum(sampled_log_probs)):
        return _accept_finite(rows, tokens, log_probs, raw_log_probs, sampled_log_probs, version)
    for sequence, token, log_prob, raw, sampled in zip(
        rows, tokens, log_probs, raw_log_probs, sampled_log_probs, strict=True
    ):
        if sequence.done:
            continue
        sequence.in_flight -= 1
        output = sequence.output
        sequence.token_ids.append(token)
        output.token_ids.append(token)
        output.log_probs.append(log_prob)
        output.raw_log_probs.append(raw)
        output.sampled_log_probs.append(sampled)
        output.versions.append(version)
    return []


def _accept_finite(
    rows: list[Sequence],
    tokens: list[int],
    log_probs: list[float],
    raw_log_probs: list[float],
    sampled_log_probs: list[float],
    version: int,
) -> list[Sequence]:
    """`accept_tokens` for a step with a non-finite log-prob."""
    failed, finite = [], []
    for row, (sequence, token) in enumerate(zip(rows, tokens, strict=True)):
        values = [log_probs[row], raw_log_probs[row], sampled_log_probs[row]]
        if sequence.done:
            continue
        if all(map(math.isfinite, values)):
            finite.append(row)
            continue
        sequence.in_flight -= 1
        sequence.error = _not_finite(sequence, token, values, version)
        failed.append(sequence)
    columns = (log_probs, raw_log_probs, sampled_log_probs)
    full, raw, sampled = ([column[row] for row in finite] for column in columns)
    accept_tokens([rows[row] for row in finite], [tokens[row] for row in finite], full, raw, sampled, version)
    return failed


def _not_finite(sequence: Sequence, token: int, log_probs: list[float], version: int) -> Exception:
    """The error of a sequence whose log-probs (full, raw, sampled) are not all finite."""
    full, raw, _ = log_probs
    if math.isfinite(full) and math.isfinite(raw):
        return ValueError(
            f"request {sequence.request.id!r}: no token is allowed at position {len(sequence.token_ids)}: logit_bias,"
            " the grammar and the tokens that are banned until min_new_tokens exclude every token. Relax one of them."
        )
    return FloatingPointError(
        f"rollout: weights of version {version} give log-prob {full} to token {token} of request"
        f" {sequence.request.id!r}. The weights hold NaN or inf, or overflow in rollout.dtype."
    )


def accept_details(plan: StepPlan, rows: list[Sequence], scored: list[Sequence], details: StepDetails) -> None:
    """Append requested top log-probs and prompt log-probs to the outputs. Called before `accept_tokens`."""
    for (row, count), top in zip(plan.top_rows, details.top, strict=True):
        if not rows[row].done:
            rows[row].output.top_log_probs.append(top[:count])
    prefills = [prefill for prefill in plan.prefills if prefill.targets]
    for sequence, prefill, (log_probs, tops) in zip(scored, prefills, details.prompts, strict=True):
        # A preempted sequence recomputes positions whose log-probs are already recorded.
        known = max(0, len(sequence.output.prompt_log_probs) - prefill.start)
        sequence.output.prompt_log_probs += log_probs[known:]
        sequence.output.prompt_top_log_probs += tops[known:]


def accept_experts(plan: StepPlan, rows: list[Sequence], experts: StepExperts) -> None:
    """Append to each sequence the experts of the forward pass that sampled its token; for its first token also those
    of its context.

    Called before `accept_tokens`, so that a token with a version always has its experts.
    """
    contexts: list[np.ndarray | None] = []
    unassigned = iter(experts.contexts)
    for prefill in plan.prefills:
        context = next(unassigned) if prefill.context_experts else None
        contexts += [context] * len(prefill.samples)
    contexts += [None] * len(plan.decode_slots)
    for row, (sequence, context) in enumerate(zip(rows, contexts, strict=True)):
        if not sequence.done:
            sampled = experts.sampled[row : row + 1]
            if context is not None and not sequence.experts:
                sequence.experts.append(join_pieces(context, len(context), sampled))
            else:
                sequence.experts.append(sampled)


def advance_grammars(rows: list[Sequence]) -> list[Sequence]:
    """Advance the grammars by the sampled tokens; returns the sequences whose grammar is complete."""
    complete = []
    for sequence in rows:
        if sequence.grammar is not None and not sequence.done:
            sequence.grammar.accept(sequence.token_ids[-1])
            if sequence.grammar.complete:
                complete.append(sequence)
    return complete


def _padded(values: list[float], count: int) -> list[float]:
    """Pad with NaN to one value per token: the engine that generated the first tokens may not have reported values."""
    return [*values, *([math.nan] * (count - len(values)))]
