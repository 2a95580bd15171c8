"""Alias module: the workers of the megatron strategy, under their public names; implemented in `verl.workers.roles`."""

from verl.workers.roles.critic import CriticWorker
from verl.workers.roles.policy import ActorRolloutRefWorker
from verl.workers.roles.reward_model import RewardModelWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
