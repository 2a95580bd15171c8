"""BatchRewardManager: the reward function gets many responses at once and returns a list of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register_reward_manager


@register_reward_manager("batch")
class BatchRewardManager(NaiveRewardManager):
    """Scores with `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, which returns a list.

    For functions that profit from many responses: a server that batches, a comparison of responses. An item of the
    list is a number or a dict with `score`, as for `naive`. A call gets `batch_size` responses (None: all) and has
    `timeout` seconds; calls run concurrently in scorer processes. If a call raises, times out, crashes or returns a
    list of the wrong length, all of its samples fail; if an item is not a finite number, only its sample fails.

    The built-in functions score single responses: without a user function, this is the naive manager.
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
        **kwargs: Any,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"reward_model.reward_kwargs.batch_size: {batch_size} is not positive. Set 1 or more.")
        self.takes_lists = compute_score not in (None, default_compute_score)
        self.batch_size = batch_size if self.takes_lists else 1
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, timeout=timeout, **kwargs)
