"""Modules that depend on no other package of verl, except `verl.config` and `verl.types`, and some alias modules.

The names of this package are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'verl.utils' has no attribute {name!r}")
    from verl.utils import tokenizer

    return getattr(tokenizer, name)


def __dir__() -> list[str]:
    return sorted(__all__)
