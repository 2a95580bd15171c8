"""PrimeRewardManager: the naive manager with tight limits, for reward functions that run what a model wrote.

Every limit is enforced by the system, on a process per core: the time of a call by SIGKILL to its process and all it
started, the memory by RLIMIT_DATA. A scorer that was killed or crashed is replaced in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.workers.reward_manager.naive import NaiveRewardManager


class PrimeRewardManager(NaiveRewardManager):
    """As `naive`, with 10 s per answer and 4 GB per scorer unless told otherwise."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        timeout: float = 10.0,
        memory_limit_gb: float | None = 4.0,
        **others: Any,
    ) -> None:
        others |= {"timeout": timeout, "memory_limit_gb": memory_limit_gb}
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **others)
