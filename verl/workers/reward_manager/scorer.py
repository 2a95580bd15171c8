"""ScorerPool: scores samples with a reward function in killable processes, so that a failure affects one sample.

`error_metrics` counts the failures by kind: `reward/errors/timeout`, …
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    gather_results,
)
from verl.utils.process_pool.processes import DoneCallback, portable_pickle
from verl.utils.progress import expect, tick
from verl.utils.reward_score import registry
from verl.utils.reward_score.calls import (
    DIED,
    ERROR_KINDS,
    INVALID,
    MEMORY,
    RAISED,
    TIMEOUT,
    ScoreFields,
    call_error,
    call_loaded_function,
    last_lines,
    load_function,
    score_batch,
    score_row,
    score_row_async,
    score_rows_concurrently,
)
from verl.workers.reward_manager.event_loops import EventLoops, ScoreCall

# Column with the kind of error of each response; None: it was scored.
ERROR_COLUMN = "scoring_error"
_KINDS = {TaskTimeout: TIMEOUT, ProcessDied: DIED, CannotSend: INVALID, MemoryError: MEMORY}


@dataclass(frozen=True)
class Sample:
    """One response to score; the fields are the arguments of a reward function."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    raw_prompt: Any = None
    """The messages of the prompt, for functions with this parameter."""


@dataclass(slots=True)
class Score:
    """The result of a reward function, or the error (the value is then 0)."""

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields that the function returned."""
    error: str | None = None
    """Error message."""
    kind: str | None = None
    """Kind of error: raised, invalid (not a finite number), memory, timeout or died (the process)."""


def error_metrics(columns: Mapping[str, Iterable[Any]], prefix: str = "") -> dict[str, float]:
    """Return the number of responses that could not be scored: `reward/errors`, and by kind `reward/errors/timeout`,
    `reward/errors/raised`, … (`ERROR_KINDS`); {} without the column `scoring_error`, which reward managers add.

    Kinds that did not occur are 0. `prefix`: of the metric names, e.g. `val/`.
    """
    if ERROR_COLUMN not in columns:
        return {}
    counts = Counter(kind for kind in columns[ERROR_COLUMN] if kind is not None)
    by_kind = {f"{prefix}reward/errors/{kind}": float(counts[kind]) for kind in (*ERROR_KINDS, *counts)}
    return {f"{prefix}reward/errors": float(counts.total()), **by_kind}


class ScorerPool:
    """Up to `processes` scorer processes of one function, started with the first sample. 0: no processes are started,
    and samples are scored in the caller's thread.

    `compute_score(data_source, solution_str, ground_truth, extra_info)` is sent by content (cloudpickle), or, if that
    is not possible, as the text of its file; ValueError if neither is possible. Each call is limited to `timeout`
    seconds, each process to `memory_limit` bytes beyond its memory at the start; without processes there are no limits.
    `takes_lists`: the function gets lists of up to `batch_size` samples (None: all). Calls of an async function of one
    sample run concurrently, hundreds per process.
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
        self._score_call = functools.partial(score_batch if takes_lists else score_row, compute_score)
        self._pool = self._loops = None
        self._is_async = is_async(compute_score) and not takes_lists
        if processes:
            registered = registry.user_functions() if compute_score is registry.default_compute_score else {}
            initializer = functools.partial(load_function, self._score_call, registered)
            with self._explained_errors():
                portable_pickle(initializer)  # raises now, not at the first sample
            self._pool = ProcessPool(processes, initializer=initializer, memory_limit=memory_limit)
        if processes and self._is_async:
            initializer = functools.partial(load_function, functools.partial(score_row_async, compute_score), {})
            pool = ProcessPool(processes, initializer=initializer, memory_limit=memory_limit)
            self._loops = EventLoops(pool, processes, timeout, self._run_isolated)

    def submit(self, sample: Sample) -> Future[Score]:
        """Queue a sample. The future gets a Score, also if the function fails; PoolClosed if the pool is closed."""
        future: Future[Score] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled any more

        def done(_: int, value: Any, error: Exception | None) -> None:
            if isinstance(error, PoolClosed):
                future.set_exception(error)
            elif self._takes_lists:
                future.set_result(_scores_of_call(1, value if error is None else error)[0])
            else:
                future.set_result(_score(value if error is None else error))

        argument: Any = [vars(sample)] if self._takes_lists else vars(sample)
        if self._pool is None:
            done(0, self._score_in_this_process(argument), None)
        else:
            with self._explained_errors():
                self._enqueue([argument], done)
        return future

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score all samples and return the scores in order. Cheaper per sample than `submit`."""
        rows: list[Any] = [vars(sample) for sample in samples]
        if not self._takes_lists:
            return [_score(result) for result in self._results(rows, [1] * len(rows))]
        size = self._batch_size or max(1, len(samples))
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        calls = zip(parts, self._results(parts, [len(part) for part in parts]), strict=True)
        return [score for part, result in calls for score in _scores_of_call(len(part), result)]

    def with_function(self, compute_score: Callable[..., Any]) -> ScorerPool:
        """Close this pool and return one with the same settings for another function."""
        self.close()
        return ScorerPool(compute_score, *self._arguments[1:])

    @property
    def scored_again(self) -> int:
        """Total number of samples that were scored again because their process was killed or stopped from outside."""
        return 0 if self._pool is None else self._pool.retried_calls

    def close(self) -> None:
        """End all processes; waiting samples fail with PoolClosed. The pool may be used again."""
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

    def _results(self, calls: Sequence[Any], samples: Sequence[int]) -> Sequence[Any]:
        """The results or exceptions of all calls. `samples`: number of samples of each call, for progress reports."""
        if self._pool is not None:
            with self._explained_errors():
                return gather_results(functools.partial(self._enqueue, calls), len(calls), samples)
        expect(sum(samples))
        if self._is_async:
            results = score_rows_concurrently(self._compute, calls)
            tick(len(calls))
            return results
        results = []
        for argument, count in zip(calls, samples, strict=True):
            results.append(self._score_in_this_process(argument))
            tick(count)
        return results

    def _enqueue(self, calls: Sequence[Any], done: DoneCallback) -> None:
        assert self._pool is not None
        if self._loops is not None:
            self._loops.enqueue(calls, done)
        else:
            self._pool.enqueue(call_loaded_function, [(argument,) for argument in calls], done, self._timeout)

    def _run_isolated(self, call: ScoreCall) -> None:
        """Execute a call of an async function in a process without other calls."""
        assert self._pool is not None
        self._pool.enqueue(call_loaded_function, [(call.row,)], lambda _, *result: call.finish(*result), self._timeout)

    def _score_in_this_process(self, argument: Any) -> Any:
        try:
            return self._score_call(argument)
        except MemoryError as error:
            return error

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except CannotSend as error:
            raise ValueError(
                f"custom_reward_function: it cannot be sent to a scorer process ({error}). Create the objects that it "
                "uses inside the function or at the top of its file, or set "
                "reward_model.reward_kwargs.num_processes=0 to score in the trainer's process."
            ) from error
        except InitializerError as error:
            name = getattr(self._compute, "__name__", type(self._compute).__name__)
            raise ValueError(
                f"custom_reward_function: {name} cannot be loaded in a scorer process, which is a new interpreter:\n"
                f"{error}"
            ) from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _score(result: ScoreFields | Exception) -> Score:
    if not isinstance(result, Exception):
        return Score(*result)
    kind = next((kind for error, kind in _KINDS.items() if isinstance(result, error)), RAISED)
    if kind in (MEMORY, RAISED):
        return Score(0.0, {}, last_lines(str(result.__cause__ or repr(result))), kind)
    return Score(0.0, {}, f"the reward function {result}", kind)


def _scores_of_call(count: int, result: Sequence[ScoreFields] | Exception) -> list[Score]:
    """The scores of one call with `count` samples."""
    if not isinstance(result, Exception):
        return [Score(*fields) for fields in result]
    failed = _score(result)
    return [replace(failed, error=call_error(count, str(failed.error)))] * count
