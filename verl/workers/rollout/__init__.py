"""Rollout engines: what generates answers. One is imported only when it is chosen by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.workers.rollout.base import BaseRollout

__all__ = ["ROLLOUT_CLASSES", "get_rollout_class"]

ROLLOUT_CLASSES: dict[str, str] = {
    "native": "verl.workers.rollout.native_rollout:NativeRollout",
    "hf": "verl.workers.rollout.hf_rollout:HFRollout",
}


def get_rollout_class(name: str) -> type[BaseRollout]:
    """The class behind `rollout.name`."""
    if name not in ROLLOUT_CLASSES:
        raise ValueError(
            f"name: the engine {name!r} does not exist in this version (there is:"
            f" {', '.join(sorted(ROLLOUT_CLASSES))}). Set name=hf."
        )
    module, _, attribute = ROLLOUT_CLASSES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
