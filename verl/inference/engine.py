"""Engine: schedule a step, launch it, take the results of the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.inference.step_plan import StepDetails, StepExperts, StepPlan
from verl.types.request import Request
from verl.utils.progress import pulse

__all__ = ["Engine", "Pending", "Runner", "StepEngine"]

Results = tuple[list[int], list[float], list[float], list[float]]


class Pending(Protocol):
    """A step on its way."""

    def wait(self) -> Results:
        """Tokens, log-probs, raw and sampled log-probs, in the order of the plan's `sample_slots`."""

    def details(self) -> StepDetails:
        """After `wait`, of a plan that is `detailed`."""

    def experts(self) -> StepExperts:
        """The experts of a plan with `returns_experts`. Call `wait` first."""


class Runner(Protocol):
    """What computes steps, in the order they are launched."""

    @property
    def lag(self) -> int:
        """Steps that are launched before the results of an earlier one are read: 1 keeps a GPU busy, 0 is for CPUs."""

    def launch(self, plan: StepPlan) -> Pending: ...


class StepEngine(Protocol):
    """What is driven. Its methods are called by one thread at a time."""

    version: int

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that can never be answered."""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences, in order."""

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Forget these."""

    def step(self) -> list[Sequence]:
        """Go on by a step; returns who is finished. One that moves something says `pulse()`."""

    @property
    def has_work(self) -> bool:
        """`step` has something to do."""

    @property
    def in_flight(self) -> bool:
        """Steps were launched whose tokens have not been taken."""

    def drain(self) -> list[Sequence]:
        """Take them; returns who is finished."""

    def requeue_all(self) -> None:
        """Drop all KV; what runs is computed again and goes on."""

    def forget_prefixes(self) -> None:
        """Whoever comes later takes over nobody's KV."""

    def clear(self) -> None:
        """Forget everybody."""


class Engine:
    """Runs sequences to their end, one step at a time. Not thread-safe: `AsyncEngine` drives it from a thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, vocab_size: int | None = None) -> None:
        """`vocab_size`: requests with token ids outside of the vocabulary are rejected. None: ids are not checked."""
        self.version = 0
        """Version of the weights; each token is stamped with that of the moment its step was launched."""
        self.scheduler = scheduler
        self.runner = runner
        self._vocab_size = vocab_size
        self._pending: deque[tuple[StepPlan, Pending, int]] = deque()

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that can never be answered here."""
        self.scheduler.check(request)
        if self._vocab_size is not None:
            _check_token_ids(request, self._vocab_size)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.scheduler.add(sequences)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Forget them; their outputs stay as they are."""
        self.scheduler.remove(sequences)

    def step(self) -> list[Sequence]:
        """One token for all that run, or fewer; returns who is finished."""
        pulse()
        plan = self.scheduler.schedule()
        if plan is None:
            return self.drain()
        self._pending.append((plan, self.runner.launch(plan), self.version))
        return self._settle(self.runner.lag)

    def drain(self) -> list[Sequence]:
        """Wait for everything that was launched; returns who is finished by it."""
        return self._settle(0)

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_work

    @property
    def in_flight(self) -> bool:
        """Steps were launched whose results have not been taken."""
        return bool(self._pending)

    def requeue_all(self) -> None:
        """The KV memory is void: what runs is computed again from its tokens, and goes on."""
        self.scheduler.requeue_all()

    def forget_prefixes(self) -> None:
        """Whoever comes later takes over nobody's KV."""
        self.scheduler.blocks.flush()

    def clear(self) -> None:
        """Forget everybody."""
        self._pending.clear()
        self.scheduler.clear()

    def _settle(self, ahead: int) -> list[Sequence]:
        finished: list[Sequence] = []
        while len(self._pending) > ahead:
            plan, pending, version = self._pending.popleft()
            results = pending.wait()
            details = pending.details() if plan.detailed else None
            experts = pending.experts() if plan.returns_experts else None
            finished += self.scheduler.settle(plan, *results, version, details, experts)
        return finished


def _check_token_ids(request: Request, vocab_size: int) -> None:
    """Raise ValueError for ids without a row in the embedding or a logit: indexing with them fails for the batch."""
    params = request.params
    used = {
        "prompt_ids": request.prompt_ids,
        "resume_from": request.resume_from.token_ids if request.resume_from else (),
        "stop_token_ids": params.stop_token_ids,
        "eos_token_ids": params.eos_token_ids if params.min_new_tokens else (),
        "logit_bias": [token for token, _ in params.logit_bias],
    }
    for name, token_ids in used.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise ValueError(
                f"request {request.id!r}: {name} has token {wrong}; ids of this model are 0 to {vocab_size - 1}."
            )
