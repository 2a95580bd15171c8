"""Memory that malloc holds after it was freed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Return free memory of the heap to the system, where the C library can (glibc)."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
