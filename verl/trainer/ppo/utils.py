"""Roles of a run, and which of them it needs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

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
    """Whether a reference policy was registered."""
    return Role.RefPolicy in role_worker_mapping


def need_reward_model(role_worker_mapping: Mapping[Role, Any]) -> bool:
    """Whether a reward model was registered."""
    return Role.RewardModel in role_worker_mapping
