"""Reward managers: score a batch of responses."""

from verl.workers.reward_manager.batch import BatchRewardManager
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.prime import PrimeRewardManager
from verl.workers.reward_manager.registry import get_reward_manager_cls, register
from verl.workers.reward_manager.scorer import Sample, Score, ScorerPool

__all__ = [
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "Sample",
    "Score",
    "ScorerPool",
    "get_reward_manager_cls",
    "register",
]
