"""ScorerPool: Sample in, Score out. Reward functions run in killable processes, so that a failure costs one sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl.utils.process_pool import CannotSend, InitializerError, PoolClosed, ProcessDied, ProcessPool, TaskTimeout
from verl.utils.reward_score import registry
from verl.utils.reward_score.attempt import (
    DIED,
    INVALID,
    MEMORY,
    RAISED,
    TIMEOUT,
    Fields,
    Rows,
    last_lines,
    load,
    of_a_call,
    score_each,
    score_lists,
    score_loaded,
)

_KINDS = {TaskTimeout: TIMEOUT, ProcessDied: DIED, CannotSend: INVALID, MemoryError: MEMORY}


@dataclass(frozen=True)
class Sample:
    """One answer to score; the fields are what a reward function is called with."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


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

    `compute_score(data_source, solution_str, ground_truth, extra_info)` travels by content (cloudpickle). Each call has
    `timeout` seconds, and its process `memory_limit` bytes beyond what is loaded. Without processes there is neither.
    With `takes_lists` the function gets lists of up to `batch_size` samples (None: all that there are).
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
        self._score_rows = functools.partial(score_lists if takes_lists else score_each, compute_score)
        self._pool = None
        if processes:
            own = registry.users_own() if compute_score is registry.default_compute_score else {}
            load_it = functools.partial(load, self._score_rows, own)
            self._pool = ProcessPool(processes, initializer=load_it, memory_limit=memory_limit)

    def submit(self, sample: Sample) -> Future[Score]:
        """Score a sample some time soon. The future always gets a Score, unless the pool itself breaks or closes."""
        future: Future[Score] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled

        def done(_: int, fields: Any, error: Exception | None) -> None:
            if isinstance(error, PoolClosed):
                future.set_exception(error)
            else:
                future.set_result(self._scores(1, fields if error is None else error)[0])

        if self._pool is None:
            future.set_result(self._scored_here([sample])[0])
        else:
            with self._start_explained():
                self._pool.enqueue(score_loaded, [(_rows([sample]),)], done, self._timeout)
        return future

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score all and wait, with less ado per sample than futures make; in order."""
        size = self._batch_size or max(1, len(samples))
        parts = [samples[at : at + size] for at in range(0, len(samples), size)]
        if self._pool is None:
            return [score for part in parts for score in self._scored_here(part)]
        with self._start_explained():
            outcomes = self._pool.run(score_loaded, ((_rows(part),) for part in parts), self._timeout)
        return [
            score for part, outcome in zip(parts, outcomes, strict=True) for score in self._scores(len(part), outcome)
        ]

    def close(self) -> None:
        """Stop every process; samples still waiting are cancelled. The pool may be used again."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return ScorerPool, self._arguments

    def _scored_here(self, samples: Sequence[Sample]) -> list[Score]:
        try:
            return self._scores(len(samples), self._score_rows(_rows(samples)))
        except MemoryError as error:
            return self._scores(len(samples), error)

    def _scores(self, count: int, outcome: tuple[Fields, ...] | Exception) -> list[Score]:
        if not isinstance(outcome, Exception):
            return [Score(*fields) for fields in outcome]
        kind = next((kind for error, kind in _KINDS.items() if isinstance(outcome, error)), RAISED)
        text = f"the reward function {outcome}"
        if kind in (MEMORY, RAISED):
            text = last_lines(str(outcome.__cause__ or repr(outcome)))
        return [Score(0.0, {}, of_a_call(count, text) if self._takes_lists else text, kind)] * count

    @contextmanager
    def _start_explained(self) -> Iterator[None]:
        try:
            yield
        except CannotSend as error:
            raise ValueError(
                f"custom_reward_function: it cannot travel to a scorer process ({error}). Make what it holds inside "
                "the function, or set reward_model.reward_kwargs.num_processes=0 to score in the trainer's own process."
            ) from error
        except InitializerError as error:
            name = getattr(self._compute, "__name__", type(self._compute).__name__)
            raise ValueError(
                f"custom_reward_function: {name} cannot be loaded in a scorer process, which starts from scratch:\n"
                f"{error}"
            ) from error


def _rows(samples: Sequence[Sample]) -> Rows:
    return [vars(sample) for sample in samples]
