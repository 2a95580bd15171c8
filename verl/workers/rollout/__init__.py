"""Rollout engines: what generates answers. One is imported only when it is chosen by name."""

from __future__ import annotations

from typing import Any

from verl.config import names
from verl.utils.registry import Registry

__all__ = ["ROLLOUTS", "get_rollout_class"]


ROLLOUTS: Registry[type[Any]] = Registry("rollout.name", names.ROLLOUTS)
get_rollout_class = ROLLOUTS.lookup
