"""Rollout engines, which generate responses. An engine is one file or package that declares its name and traits."""

from __future__ import annotations

from typing import Any

from verl.config import names
from verl.utils.registry import Registry

__all__ = ["ROLLOUTS", "get_rollout_class", "register_rollout"]


ROLLOUTS: Registry[type[Any]] = Registry("rollout.name", names.ROLLOUTS)
get_rollout_class = ROLLOUTS.lookup
# `@register_rollout("mine", …)` decorates a subclass of BaseRollout; traits: `verl.config.names.RolloutTraits`.
register_rollout = ROLLOUTS.register
