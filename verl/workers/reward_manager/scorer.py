"""ScorerPool: Sample in, Score out. Reward functions run in killable processes, so that a failure costs one sample."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from verl.utils.process_pool import (
    CannotSend,
    InitializerError,
    PoolClosed,
    ProcessDied,
    ProcessPool,
    TaskTimeout,
    gathered,
)
from verl.utils.process_pool.processes import Done, portable
from verl.utils.progress import expect, tick
from verl.utils.reward_score import registry
from verl.utils.reward_score.calls import (
    DIED,
    INVALID,
    MEMORY,
    RAISED,
    TIMEOUT,
    Fields,
    call_error,
    last_lines,
    load,
    score_awaited,
    score_lists,
    score_loaded,
    score_row,
    score_together,
)
from verl.workers.reward_manager.event_loops import Call, EventLoops

_KINDS = {TaskTimeout: TIMEOUT, ProcessDied: DIED, CannotSend: INVALID, MemoryError: MEMORY}


@dataclass(frozen=True)
class Sample:
    """One answer to score; the fields are what a reward function is called with."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    raw_prompt: Any = None
    """The messages that it answers, for functions that ask for them."""


@dataclass(slots=True)
class Score:
    """What a reward function said: its value and further fields; or why there is none (the value is then 0).

    `kind` of an error: raised, invalid (no finite number), memory, timeout or died (the process).
    """

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    kind: str | None = None


class ScorerPool:
    """Up to `processes` scorers of one function, started with the first sample; 0 scores in the caller's thread.

    `compute_score(data_source, solution_str, ground_truth, extra_info)` travels by content (cloudpickle), or, where it
    holds what cannot, by the text of its file; ValueError at once where neither is possible. Each call has
    `timeout` seconds, and its process `memory_limit` bytes beyond what is loaded. Without processes there is neither.
    With `takes_lists` the function gets lists of up to `batch_size` samples (None: all that there are). An async
    function of one sample runs for hundreds of them at once, on an event loop in a scorer.
    """

    def __init__(
        self,
        compute_score: Callable[..., Any],
        processes: int,
        timeout: float,
        memory_limit: int | None = None,
        takes_lists: bool = False,
        batch_size: int | None = 1,
    ) -> None:
        self._arguments = compute_score, processes, timeout, memory_limit, takes_lists, batch_size
        self._compute, self._timeout = compute_score, timeout
        self._takes_lists, self._batch_size = takes_lists, batch_size
        self._score_here = functools.partial(score_lists if takes_lists else score_row, compute_score)
        self._pool = self._loops = None
        self._awaits = is_async(compute_score) and not takes_lists
        if processes:
            own = registry.users_own() if compute_score is registry.default_compute_score else {}
            load_it = functools.partial(load, self._score_here, own)
            with self._start_explained():
                portable(load_it)  # told now, not with the first answers
            self._pool = ProcessPool(processes, initializer=load_it, memory_limit=memory_limit)
        if processes and self._awaits:
            load_it = functools.partial(load, functools.partial(score_awaited, compute_score), {})
            pool = ProcessPool(processes, initializer=load_it, memory_limit=memory_limit)
            self._loops = EventLoops(pool, processes, timeout, self._alone)

    def submit(self, sample: Sample) -> Future[Score]:
        """Score a sample some time soon. The future always gets a Score, unless the pool itself breaks or closes."""
        future: Future[Score] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled

        def done(_: int, value: Any, error: Exception | None) -> None:
            if isinstance(error, PoolClosed):
                future.set_exception(error)
            elif self._takes_lists:
                future.set_result(_scores_of_call(1, value if error is None else error)[0])
            else:
                future.set_result(_score(value if error is None else error))

        given: Any = [vars(sample)] if self._takes_lists else vars(sample)
        if self._pool is None:
            done(0, self._outcome_here(given), None)
        else:
            with self._start_explained():
                self._enqueue([given], done)
        return future

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score all and wait, with less ado per sample than futures make; in order."""
        rows: list[Any] = [vars(sample) for sample in samples]
        if not self._takes_lists:
            return [_score(outcome) for outcome in self._outcomes(rows, [1] * len(rows))]
        size = self._batch_size or max(1, len(samples))
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        calls = zip(parts, self._outcomes(parts, [len(part) for part in parts]), strict=True)
        return [score for part, outcome in calls for score in _scores_of_call(len(part), outcome)]

    def of(self, compute_score: Callable[..., Any]) -> ScorerPool:
        """The same for another function; this one is closed."""
        self.close()
        return ScorerPool(compute_score, *self._arguments[1:])

    @property
    def scored_again(self) -> int:
        """Samples whose scorer was killed or stopped by somebody else, and that another one scored, so far."""
        return 0 if self._pool is None else self._pool.made_again

    def close(self) -> None:
        """Stop every process; samples still waiting are cancelled. The pool may be used again."""
        if self._loops is not None:
            self._loops.close()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return ScorerPool, self._arguments

    def _outcomes(self, calls: Sequence[Any], samples: Sequence[int]) -> Sequence[Any]:
        """What becomes of calls with so many samples each, which count as progress as they are done."""
        if self._pool is not None:
            with self._start_explained():
                return gathered(functools.partial(self._enqueue, calls), len(calls), samples)
        expect(sum(samples))
        if self._awaits:
            found = score_together(self._compute, calls)
            tick(len(calls))
            return found
        outcomes = []
        for given, count in zip(calls, samples, strict=True):
            outcomes.append(self._outcome_here(given))
            tick(count)
        return outcomes

    def _enqueue(self, calls: Sequence[Any], done: Done) -> None:
        assert self._pool is not None
        if self._loops is not None:
            self._loops.enqueue(calls, done)
        else:
            self._pool.enqueue(score_loaded, [(given,) for given in calls], done, self._timeout)

    def _alone(self, call: Call) -> None:
        """In a process that no other call shares, whatever became of the loop it was on."""
        assert self._pool is not None
        self._pool.enqueue(score_loaded, [(call.row,)], lambda _, *outcome: call.tell(*outcome), self._timeout)

    def _outcome_here(self, given: Any) -> Any:
        try:
            return self._score_here(given)
        except MemoryError as error:
            return error

    @contextmanager
    def _start_explained(self) -> Iterator[None]:
        try:
            yield
        except CannotSend as error:
            raise ValueError(
                f"custom_reward_function: it cannot travel to a scorer process ({error}). Make what it holds inside "
                "the function or at the top of its file, or set reward_model.reward_kwargs.num_processes=0 to score in "
                "the trainer's own process."
            ) from error
        except InitializerError as error:
            name = getattr(self._compute, "__name__", type(self._compute).__name__)
            raise ValueError(
                f"custom_reward_function: {name} cannot be loaded in a scorer process, which starts from scratch:\n"
                f"{error}"
            ) from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to wait for."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _score(outcome: Fields | Exception) -> Score:
    if not isinstance(outcome, Exception):
        return Score(*outcome)
    kind = next((kind for error, kind in _KINDS.items() if isinstance(outcome, error)), RAISED)
    if kind in (MEMORY, RAISED):
        return Score(0.0, {}, last_lines(str(outcome.__cause__ or repr(outcome))), kind)
    return Score(0.0, {}, f"the reward function {outcome}", kind)


def _scores_of_call(count: int, outcome: Sequence[Fields] | Exception) -> list[Score]:
    if not isinstance(outcome, Exception):
        return [Score(*fields) for fields in outcome]
    failed = _score(outcome)
    return [replace(failed, error=call_error(count, str(failed.error)))] * count
