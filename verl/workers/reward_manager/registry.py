"""Reward managers by name (`reward_model.reward_manager`)."""

from __future__ import annotations

from typing import Any

from verl.config import names
from verl.utils.registry import Registry

REWARD_MANAGER_REGISTRY: Registry[type[Any]] = Registry("reward_model.reward_manager", names.REWARD_MANAGERS)

# `@register("mine")` decorates a class with the arguments `(tokenizer, num_examine, compute_score, reward_fn_key, …)`.
register = register_reward_manager = REWARD_MANAGER_REGISTRY.register
get_reward_manager_cls = REWARD_MANAGER_REGISTRY.lookup
