"""Processes that do a part of this one's work: whoever watches this one is told of one that cannot run."""

from __future__ import annotations

from collections.abc import Callable

from verl.utils.process_tree import standstill

__all__ = ["Standing", "add_helper", "remove_helper", "standing_helper"]

Standing = tuple[int, str]
"""(process id, why it cannot run: stopped or traced)."""

_helpers: dict[int, Callable[[], bool]] = {}


def add_helper(pid: int, awaited: Callable[[], bool]) -> None:
    """From now on; `awaited()` says, from any thread, whether this process waits for that one."""
    _helpers[pid] = awaited


def remove_helper(pid: int) -> None:
    """It has ended."""
    _helpers.pop(pid, None)


def standing_helper() -> Standing | None:
    """One that this process waits for, and that is stopped."""
    for pid, awaited in list(_helpers.items()):
        if awaited() and (why := standstill(pid)) in ("stopped", "traced"):
            return pid, why
    return None
