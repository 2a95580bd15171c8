"""BatchRewardManager: the reward function gets all answers at once and returns a list of scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.attempt import score_lists
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.scorer import Sample, Score


class BatchRewardManager(NaiveRewardManager):
    """Scores with `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, which returns a list.

    For functions that are better off with many answers: a server that batches, a comparison between answers. An item of
    the list is a number or a dict with `score`, as for `naive`. `batch_size` answers go into a call (None: all), a call
    has `timeout` seconds, and calls run side by side in scorer processes. A call that raises, hangs, dies or returns a
    list of another length costs all of its samples; an item that is no finite number costs its own.

    The built-in functions take one answer at a time: without a function of the user this is the naive manager.
    """

    required_arguments = ("solution_strs", "ground_truths")
    optional_arguments = ("data_sources", "extra_infos")

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        batch_size: int | None = None,
        timeout: float = 600.0,
        **others: Any,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"reward_model.reward_kwargs.batch_size: {batch_size} answers are no batch. Set 1 or more."
            )
        self.batch_size = batch_size
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, timeout=timeout, **others)

    def submit(self, sample: Sample) -> Future[Score]:
        """One answer: a list of one."""
        if not self._takes_lists:
            return super().submit(sample)
        result: Future[Score] = Future()
        self._submit([sample]).add_done_callback(lambda call: _pass_on(call, result))
        return result

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        if not self._takes_lists:
            return super().score(samples)
        size = self.batch_size or max(1, len(samples))
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        calls = [self._submit(part) for part in parts]
        return [score for call, part in zip(calls, parts, strict=True) for score in _rows(call.result(), len(part))]

    @property
    def _takes_lists(self) -> bool:
        return self.compute_score is not default_compute_score

    def _call(self) -> Callable[..., Any]:
        return functools.partial(score_lists, self.compute_score) if self._takes_lists else super()._call()

    def _submit(self, samples: Sequence[Sample]) -> Future[Score]:
        return self._pool.submit_call({"rows": [vars(sample) for sample in samples]})


def _rows(call: Score, count: int) -> list[Score]:
    """The scores of a call; where it failed, that of each of its rows."""
    if call.error is None:
        return [Score(*fields) for fields in call.extra["scores"]]
    return [Score(0.0, {}, f"the call with its {count} answers failed: {call.error}", call.kind)] * count


def _pass_on(call: Future[Score], result: Future[Score]) -> None:
    error = call.exception()
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(_rows(call.result(), 1)[0])
