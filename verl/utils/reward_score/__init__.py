"""Rewards by rule: one file per task, found by a row's `data_source`. Nothing heavy: scorer processes load it."""

from verl.utils.reward_score import gsm8k
from verl.utils.reward_score.registry import (
    default_compute_score,
    known_data_sources,
    register_score,
    score_function,
)

__all__ = ["default_compute_score", "gsm8k", "known_data_sources", "register_score", "score_function"]
