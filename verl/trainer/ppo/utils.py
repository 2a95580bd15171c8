"""Roles of worker groups, and which of them a run has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from verl.config import PPOConfig
from verl.config.load import Config, load_config


class Role(Enum):
    """Role of a worker group. `str(role)` is the spawn prefix and the worker's `role` argument."""

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


POLICY_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
"""Roles that train the policy; a run has exactly one of them."""


def need_critic(config: Config) -> bool:
    """Return whether the run has a critic: the estimator needs values, or the configuration enables it."""
    return load_config(config, check_files=False).critic.enable


def need_reference_policy(role_worker_mapping: Mapping[Role, Any]) -> bool:
    """Return whether a reference policy was registered: `RefPolicy`, or `ActorRolloutRef`, which contains one."""
    return not {Role.RefPolicy, Role.ActorRolloutRef}.isdisjoint(role_worker_mapping)


def need_reward_model(role_worker_mapping: Mapping[Role, Any]) -> bool:
    """Return whether a reward model was registered."""
    return Role.RewardModel in role_worker_mapping


def require_mode(config: PPOConfig, modes: Collection[str], trainer: str) -> None:
    """Raise ValueError if the trainer class `trainer`, which supports these modes, does not support `trainer.mode`."""
    mode = config.trainer.mode
    if mode not in modes:
        other = "ppo.ray_trainer.RayPPOTrainer" if mode == "sync" else "asynchronous.trainer.AsyncPPOTrainer"
        raise ValueError(
            f"trainer.mode: {mode}, but {trainer} supports {' or '.join(modes)}. Use verl.trainer.{other}."
        )
