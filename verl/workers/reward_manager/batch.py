"""BatchRewardManager: the reward function gets all answers at once and returns a list of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.naive import NaiveRewardManager


class BatchRewardManager(NaiveRewardManager):
    """Scores with `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, which returns a list.

    For functions that are better off with many answers: a server that batches, a comparison between answers. An item of
    the list is a number or a dict with `score`, as for `naive`. `batch_size` answers go into a call (None: all), a call
    has `timeout` seconds, and calls run side by side in scorer processes. A call that raises, hangs, dies or returns a
    list of another length costs all of its samples; an item that is no finite number costs its own.

    The built-in functions take one answer at a time: without a function of the user this is the naive manager.
    """

    required_arguments = ("solution_strs", "ground_truths")
    optional_arguments = ("data_sources", "extra_infos", "raw_prompts")

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
        # Ours take one answer at a time.
        self.takes_lists = compute_score not in (None, default_compute_score)
        self.batch_size = batch_size if self.takes_lists else 1
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, timeout=timeout, **others)
