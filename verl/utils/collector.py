"""Python's garbage collector in a process that has begun: what is alive then stays, and is not walked over again.

A process with torch, transformers and compiled graphs holds about a million objects. Every full collection looks at all
of them, for half a second in which nothing else runs, and a thousand short answers a step bring one every few steps.
"""

from __future__ import annotations

import gc
from collections import Counter

# The first call of a method loads, compiles and captures.
_WARM_AFTER = 2


def settle() -> None:
    """Leave out of later collections whatever is alive now.

    It is still freed when nobody refers to it any more. Only if it becomes part of a circle does it stay: this is for a
    few moments of a process's life, not for every step.
    """
    gc.collect()
    gc.freeze()


class Settling:
    """Settles a process once more as each kind of call has come for the second time."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def called(self, name: str) -> None:
        self._calls[name] += 1
        if self._calls[name] == _WARM_AFTER:
            settle()
