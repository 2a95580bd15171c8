"""Reinforcement learning for language models.

Attributes are loaded on first use (PEP 562), so `import verl` costs milliseconds and imports neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verl.version import __version__

if TYPE_CHECKING:
    from verl.protocol import DataProto

__all__ = ["DataProto", "__version__"]

_LAZY = {"DataProto": "verl.protocol"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'verl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
