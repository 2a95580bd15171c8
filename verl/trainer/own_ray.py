"""The processes of a Ray that this process started: out of the way of its signals, watched, and ended with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl.utils.process_tree import children, kill_family, states

# Without one of these there is no Ray.
_ESSENTIAL = ("gcs_server", "raylet")


class OwnRay:
    """Nothing of ours where a running cluster was joined: then there is nothing to watch or to end."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._names = {pid: _name(pid) for pid in pids}
        self._seen = set(pids)

    def lost(self, signalled: bool = False) -> str | None:
        """The process without which there is no Ray, if it has ended.

        `signalled`: we were asked to end, and any that ended since was too; the essential ones take longer to go.
        """
        ended = [pid for pid in self._names if states(pid)[:1] in ([], ["Z"])]
        fatal = [pid for pid in ended if self._names[pid] in _ESSENTIAL or (signalled and pid in self._seen)]
        if not signalled:
            self._seen.difference_update(ended)
        return f"{self._names[fatal[0]]}, pid {fatal[0]}" if fatal else None

    def kill(self) -> None:
        """End all of it now, workers included."""
        for pid in self._names:
            kill_family(pid)


@contextmanager
def started_apart() -> Iterator[list[int]]:
    """Processes started in this block lead process groups of their own, so that a signal to our group (of a scheduler,
    of `timeout`, of a terminal that closes) reaches us alone, and we can still finish with them; their pids are given.

    Ray forks with a hook of its own, and only then Python runs these; Ray's workers lead groups of theirs anyway.
    """
    global _apart
    known = set(children(os.getpid()))
    started: list[int] = []
    _apart = True
    try:
        yield started
    finally:
        _apart = False
        started += [pid for pid in children(os.getpid()) if pid not in known]


_apart = False


def _leave_group() -> None:
    if _apart:
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
