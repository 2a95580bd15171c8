"""PrimeRewardManager: the naive manager with tight limits, for reward functions that execute model output.

The limits are enforced by the operating system: the time of a call by SIGKILL to its process and all descendants, the
memory by RLIMIT_DATA. A killed or crashed scorer process is replaced within milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register_reward_manager


@register_reward_manager("prime")
class PrimeRewardManager(NaiveRewardManager):
    """As `naive`, but with defaults of 10 s per response and 4 GB per scorer process."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        timeout: float = 10.0,
        memory_limit_gb: float | None = 4.0,
        **kwargs: Any,
    ) -> None:
        kwargs |= {"timeout": timeout, "memory_limit_gb": memory_limit_gb}
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs)
