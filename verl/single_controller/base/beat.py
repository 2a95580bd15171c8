"""Beat: what a rank's process does now, told beside its work; RankReport: what is known of a rank, answer or not."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from verl.utils.liveness import Activity, StoppedProcess, current_activity, current_work, silent_peer, stopped_helper
from verl.utils.progress import pulse_count
from verl.utils.stacks import Stack, own_stacks, users_frame

_COLLECTIVES = "all_gather|all_reduce|all_to_all|reduce_scatter|broadcast|barrier|gather|scatter|reduce|send|recv"
_NAMED = re.compile(rf"(?:^|_)({_COLLECTIVES})(?:$|_)|(init_process_group|rendezvous)")
# Where torch waits for a collective under another name.
_IN_OTHER_WORDS = {"unshard": "all_gather", "wait_for_unshard": "all_gather", "foreach_reduce": "reduce_scatter"}
_PLACES = (f"torch{os.sep}distributed{os.sep}", f"sharding_manager{os.sep}transfer_group.py")
_MOST_STACKS = 4


@dataclass(frozen=True)
class Beat:
    """Of one process."""

    method: str | None = None
    """The compute call that runs, or the work beside them (`verl.utils.liveness`)."""
    seconds: float = 0.0
    """Since when it runs."""
    done: int = 0
    """Units of it, as far as they are counted, and whatever else moves in the process."""
    thread: int = 0
    stacks: tuple[Stack, ...] = ()
    """The compute thread's first, then, if asked for, those of threads in collectives or in users' code."""
    helper: StoppedProcess | None = None
    """A process that this one waits for (an engine's) and that cannot run."""
    awaits: str | None = None
    """Who else is waited for, and has not answered for long."""
    activity: Activity | None = None
    """The long operation that the process is running, such as the start of an engine."""


@dataclass(frozen=True)
class RankReport:
    """A rank as seen by who waits for it."""

    role: str
    rank: int
    host: str
    pid: int
    state: str
    """runs, stopped, traced, dead, silent (it is there and does not answer), unreachable (its node does not)."""
    beat: Beat = Beat()
    """The last that came; of a silent process, with its stack as read from outside."""

    @property
    def collective(self) -> str | None:
        """That it waits in."""
        return next(filter(None, map(collective_of, self.beat.stacks)), None)


class Heart:
    """Follows the compute lane of a process."""

    def __init__(self) -> None:
        self._running: tuple[str, float, int, Callable[[], int]] | None = None

    @contextmanager
    def running(self, method: str, done: Callable[[], int]) -> Iterator[None]:
        """Around every compute call; `done` counts its units."""
        self._running = method, time.monotonic(), threading.get_ident(), done
        try:
            yield
        finally:
            self._running = None

    def beat(self, every_thread: bool) -> Beat:
        """From any thread. The stacks of all threads take milliseconds, that of the compute thread does not."""
        running = self._running or _background()
        if running is None:
            return Beat(done=pulse_count(), helper=stopped_helper())
        method, start, thread, done = running
        stacks = own_stacks(None if every_thread else thread)
        shown, activity = telling_stacks(stacks, thread), current_activity()
        units = done() + pulse_count()
        seconds = time.monotonic() - start
        return Beat(method, seconds, units, thread, shown, stopped_helper(), silent_peer(), activity)


def _background() -> tuple[str, float, int, Callable[[], int]] | None:
    """BackgroundWork beside compute calls, as if it was one; its units are the pulses of the process."""
    if (work := current_work()) is None:
        return None
    threads = {thread.name: thread.ident or 0 for thread in threading.enumerate()}
    return work.name, work.since, threads.get(work.thread, 0), lambda: 0


def telling_stacks(stacks: dict[int, Stack], thread: int) -> tuple[Stack, ...]:
    """Of a process's stacks that of `thread` first, then others that say what it may wait for."""
    others = [stack for ident, stack in stacks.items() if ident not in (thread, threading.get_ident())]
    told = [stack for stack in others if collective_of(stack) or users_frame(stack)]
    return (stacks.get(thread, ()), *told[: _MOST_STACKS - 1])


def collective_of(stack: Stack) -> str | None:
    """The collective that a thread is in, by the names of torch's own functions."""
    for frame in stack:
        if any(place in frame.file for place in _PLACES):
            if (found := _NAMED.search(frame.function)) is not None:
                return found[1] or found[2]
            if frame.function in _IN_OTHER_WORDS:
                return _IN_OTHER_WORDS[frame.function]
    return None
