"""Roles of a run, which of them it needs, and whose trainer it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from verl.config import PPOConfig
from verl.config.load import Config, load_config


class Role(Enum):
    """What a worker group does. `str(role)` is its name in the group and the worker's `role` argument."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"
    Agents = "agents"
    Teacher = "teacher"

    def __str__(self) -> str:
        return self.value


def need_critic(config: Config) -> bool:
    """Whether the estimator needs values (or the configuration asks for a critic)."""
    return load_config(config, check_files=False).critic.enable


def need_reference_policy(role_worker_mapping: Mapping[Role, Any]) -> bool:
    """Whether a reference policy was registered: `RefPolicy`, or `ActorRolloutRef`, which contains one."""
    return not {Role.RefPolicy, Role.ActorRolloutRef}.isdisjoint(role_worker_mapping)


def need_reward_model(role_worker_mapping: Mapping[Role, Any]) -> bool:
    """Whether a reward model was registered."""
    return Role.RewardModel in role_worker_mapping


def require_mode(config: PPOConfig, modes: Collection[str], trainer: str) -> None:
    """Refuse a run that the class `trainer`, which is for these modes, would train in another way."""
    mode = config.trainer.mode
    if mode not in modes:
        other = "ppo.ray_trainer.RayPPOTrainer" if mode == "sync" else "asynchronous.trainer.AsyncPPOTrainer"
        raise ValueError(f"trainer.mode: {mode}, and {trainer} is for {' or '.join(modes)}. Use verl.trainer.{other}.")
