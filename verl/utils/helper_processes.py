"""Processes that do a part of this one's work: who watches this one is told of those that cannot run, or are silent."""

from __future__ import annotations

from collections.abc import Callable

from verl.utils.process_tree import why_not_running

__all__ = ["Standing", "add_helper", "add_peer", "remove_helper", "remove_peer", "silent_peer", "standing_helper"]

Standing = tuple[int, str]
"""(process id, why it cannot run: stopped or traced)."""

_helpers: dict[int, Callable[[], bool]] = {}
_peers: list[Callable[[], str | None]] = []


def add_helper(pid: int, awaited: Callable[[], bool]) -> None:
    """From now on; `awaited()` says, from any thread, whether this process waits for that one."""
    _helpers[pid] = awaited


def remove_helper(pid: int) -> None:
    """It has ended."""
    _helpers.pop(pid, None)


def standing_helper() -> Standing | None:
    """One that this process waits for, and that is stopped."""
    for pid, awaited in _helpers.copy().items():  # in one step: other threads add theirs
        if awaited() and (why := why_not_running(pid)) in ("stopped", "traced"):
            return pid, why
    return None


def add_peer(silence: Callable[[], str | None]) -> None:
    """Somewhere else. `silence()` says, from any thread, who has not answered for long, and what is known of it."""
    _peers.append(silence)


def remove_peer(silence: Callable[[], str | None]) -> None:
    """Nobody waits for it any more."""
    _peers.remove(silence)


def silent_peer() -> str | None:
    """One that this process waits for, and that says nothing."""
    return next(filter(None, (silence() for silence in list(_peers))), None)
