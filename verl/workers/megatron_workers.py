"""Face: the workers of the megatron strategy, under the names users know: those of the others, on its engine."""

from verl.workers.roles.critic import CriticWorker
from verl.workers.roles.policy import ActorRolloutRefWorker
from verl.workers.roles.reward_model import RewardModelWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
