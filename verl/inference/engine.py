"""Engine: schedule a step, launch it, collect the results of the previous one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.inference.step_plan import StepDetails, StepExperts, StepPlan
from verl.types.request import Request
from verl.utils.progress import pulse

__all__ = ["Engine", "PendingStep", "Runner", "StepEngine"]

StepResults = tuple[list[int], list[float], list[float], list[float]]
"""Tokens, log-probs, raw log-probs and sampled log-probs; see `Output`."""


class PendingStep(Protocol):
    """A launched step."""

    def wait(self) -> StepResults:
        """Wait for the device; return the results in the order of the plan's `sample_slots`."""

    def details(self) -> StepDetails:
        """Top and prompt log-probs of a plan that is `detailed`. Call `wait` first."""

    def experts(self) -> StepExperts:
        """The experts of a plan with `returns_experts`. Call `wait` first."""


class Runner(Protocol):
    """Executes steps in the order they are launched."""

    @property
    def steps_ahead(self) -> int:
        """Number of launched steps whose results may be unread when the next step is planned: 1 keeps a GPU busy, 0 is
        for CPUs."""

    def launch(self, plan: StepPlan) -> PendingStep: ...


class StepEngine(Protocol):
    """An engine that `AsyncEngine` can drive. Its methods are called by one thread at a time."""

    version: int

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that the engine can never run."""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences, in order."""

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Drop these sequences; their outputs stay as they are."""

    def step(self) -> list[Sequence]:
        """Run one step and return the finished sequences. Calls `pulse()` when it makes progress."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    @property
    def in_flight(self) -> bool:
        """Whether launched steps have uncollected results."""

    def drain(self) -> list[Sequence]:
        """Collect the results of all launched steps; return the finished sequences."""

    def preempt_all(self) -> None:
        """Drop all KV; running sequences are recomputed from their tokens and continue."""

    def reset_prefix_cache(self) -> None:
        """Later requests reuse no KV computed before this call."""

    def clear(self) -> None:
        """Drop all sequences."""


class Engine:
    """Generates for many sequences, one step at a time. Not thread-safe: `AsyncEngine` drives it from a thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, vocab_size: int | None = None) -> None:
        """`vocab_size`: requests with token ids outside of the vocabulary are rejected. None: ids are not checked."""
        self.version = 0
        """Version of the weights; each token records the version at the launch of its step."""
        self.scheduler = scheduler
        self.runner = runner
        self._vocab_size = vocab_size
        self._pending: deque[tuple[StepPlan, PendingStep, int]] = deque()

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that this engine can never run."""
        self.scheduler.check(request)
        if self._vocab_size is not None:
            _check_token_ids(request, self._vocab_size)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.scheduler.add(sequences)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Drop these sequences; their outputs stay as they are."""
        self.scheduler.remove(sequences)

    def step(self) -> list[Sequence]:
        """Launch the next step, collect the results of an earlier one, and return the sequences finished by them."""
        pulse()
        plan = self.scheduler.schedule()
        if plan is None:
            return self.drain()
        self._pending.append((plan, self.runner.launch(plan), self.version))
        return self._collect(self.runner.steps_ahead)

    def drain(self) -> list[Sequence]:
        """Collect the results of all launched steps; return the finished sequences."""
        return self._collect(0)

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_work

    @property
    def in_flight(self) -> bool:
        """Whether launched steps have uncollected results."""
        return bool(self._pending)

    def preempt_all(self) -> None:
        """Drop all KV; running sequences are recomputed from their tokens and continue."""
        self.scheduler.preempt_all()

    def reset_prefix_cache(self) -> None:
        """Later requests reuse no KV computed before this call."""
        self.scheduler.blocks.reset_prefix_cache()

    def clear(self) -> None:
        """Drop all sequences and launched steps."""
        self._pending.clear()
        self.scheduler.clear()

    def _collect(self, max_pending: int) -> list[Sequence]:
        """Collect results until at most `max_pending` steps are pending; return the finished sequences."""
        finished: list[Sequence] = []
        while len(self._pending) > max_pending:
            plan, pending, version = self._pending.popleft()
            results = pending.wait()
            details = pending.details() if plan.detailed else None
            experts = pending.experts() if plan.returns_experts else None
            finished += self.scheduler.postprocess(plan, *results, version, details, experts)
        return finished


def _check_token_ids(request: Request, vocab_size: int) -> None:
    """Raise ValueError for ids outside of the vocabulary: indexing with them would fail the whole batch."""
    params = request.params
    ids_by_field = {
        "prompt_ids": request.prompt_ids,
        "resume_from": request.resume_from.token_ids if request.resume_from else (),
        "stop_token_ids": params.stop_token_ids,
        "eos_token_ids": params.eos_token_ids if params.min_new_tokens else (),
        "logit_bias": [token for token, _ in params.logit_bias],
    }
    for name, token_ids in ids_by_field.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            invalid = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise ValueError(
                f"request {request.id!r}: {name} has token {invalid}; ids of this model are 0 to {vocab_size - 1}."
            )
