"""Liveness of group calls: heartbeats of worker processes, reports on ranks, and open calls of the controller."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl.utils.progress import (
    Activity,
    StoppedProcess,
    current_activity,
    current_work,
    pulse_count,
    silent_peer,
    stopped_helper,
)
from verl.utils.stacks import Stack, own_stacks, users_frame

_COLLECTIVES = "all_gather|all_reduce|all_to_all|reduce_scatter|broadcast|barrier|gather|scatter|reduce|send|recv"
_COLLECTIVE_NAME = re.compile(rf"(?:^|_)({_COLLECTIVES})(?:$|_)|(init_process_group|rendezvous)")
# FSDP functions that wait for a collective without naming it.
_FSDP_COLLECTIVES = {"unshard": "all_gather", "wait_for_unshard": "all_gather", "foreach_reduce": "reduce_scatter"}
_COLLECTIVE_FILES = (f"torch{os.sep}distributed{os.sep}", f"utils{os.sep}transfer_group.py")
_MAX_STACKS = 4


@dataclass(frozen=True)
class Heartbeat:
    """What a worker process is doing now."""

    method: str | None = None
    """The running compute call, or else the running background work (`verl.utils.progress`); None: idle."""
    seconds: float = 0.0
    """How long `method` has been running."""
    done: int = 0
    """Progress counter: finished units of the call plus the pulses of the process."""
    thread: int = 0
    """Id of the thread that runs `method`."""
    stacks: tuple[Stack, ...] = ()
    """Stack of that thread; if requested, also those of threads in collectives or in user code."""
    helper: StoppedProcess | None = None
    """A stopped process that this one waits for, such as an engine's."""
    silent_peer: str | None = None
    """Description of another rank or service that this process waits for and that has not replied for long."""
    activity: Activity | None = None
    """The long operation that the process is running, such as the start of an engine."""


@dataclass(frozen=True)
class RankReport:
    """State of a rank as the controller sees it."""

    role: str
    rank: int
    host: str
    pid: int
    state: str
    """runs, stopped, traced, dead, silent (the process exists but does not reply) or unreachable (its node does not
    reply)."""
    heartbeat: Heartbeat = Heartbeat()
    """The last heartbeat received. If the process is silent, `stacks` are replaced by those read from outside it."""

    @property
    def collective(self) -> str | None:
        """The collective that the rank is in, or None."""
        return next(filter(None, map(find_collective, self.heartbeat.stacks)), None)


@dataclass(frozen=True)
class _RunningCall:
    method: str
    start: float
    thread: int
    units_done: Callable[[], int]


class ComputeTracker:
    """Tracks the compute call that a process runs, and creates its heartbeats."""

    def __init__(self) -> None:
        self._running: _RunningCall | None = None

    @contextmanager
    def running(self, method: str, units_done: Callable[[], int]) -> Iterator[None]:
        """Context of a compute call; `units_done` returns its progress."""
        self._running = _RunningCall(method, time.monotonic(), threading.get_ident(), units_done)
        try:
            yield
        finally:
            self._running = None

    def heartbeat(self, all_threads: bool) -> Heartbeat:
        """Describe what the process does now. Thread-safe.

        `all_threads`: also return stacks of other threads, which takes milliseconds.
        """
        running = self._running or _background_call()
        if running is None:
            return Heartbeat(done=pulse_count(), helper=stopped_helper())
        stacks = own_stacks(None if all_threads else running.thread)
        return Heartbeat(
            method=running.method,
            seconds=time.monotonic() - running.start,
            done=running.units_done() + pulse_count(),
            thread=running.thread,
            stacks=relevant_stacks(stacks, running.thread),
            helper=stopped_helper(),
            silent_peer=silent_peer(),
            activity=current_activity(),
        )


def _background_call() -> _RunningCall | None:
    """The running background work as a call. It counts no units: its progress is the pulses of the process."""
    if (work := current_work()) is None:
        return None
    threads = {thread.name: thread.ident or 0 for thread in threading.enumerate()}
    return _RunningCall(work.name, work.since, threads.get(work.thread, 0), lambda: 0)


def relevant_stacks(stacks: dict[int, Stack], thread: int) -> tuple[Stack, ...]:
    """The stack of `thread`, then those of other threads that are in a collective or in user code."""
    others = [stack for ident, stack in stacks.items() if ident not in (thread, threading.get_ident())]
    relevant = [stack for stack in others if find_collective(stack) or users_frame(stack)]
    return (stacks.get(thread, ()), *relevant[: _MAX_STACKS - 1])


def find_collective(stack: Stack) -> str | None:
    """The collective that a thread is in, by the names of torch's functions in its stack; None: not in one."""
    for frame in stack:
        if any(file in frame.file for file in _COLLECTIVE_FILES):
            if (match := _COLLECTIVE_NAME.search(frame.function)) is not None:
                return match[1] or match[2]
            if frame.function in _FSDP_COLLECTIVES:
                return _FSDP_COLLECTIVES[frame.function]
    return None


class OpenCall:
    """A group call whose results have not been collected yet. It is tracked as long as its future is referenced."""

    def __init__(self, group: Any, method: str) -> None:
        self.group, self.method = group, method
        self.thread, self.start = threading.get_ident(), time.monotonic()
        self.abort_error: Exception | None = None
        """Set by the hang detector: the waiting thread raises it."""
        with _lock:
            _counts["opened"] += 1
            _open.add(self)

    def close(self) -> None:
        """The results were collected, or the call failed."""
        with _lock:
            _counts["closed"] += 1
            _open.discard(self)


_open: weakref.WeakSet[OpenCall] = weakref.WeakSet()
_lock = threading.Lock()
_counts = {"opened": 0, "closed": 0}


def open_calls() -> list[OpenCall]:
    """The open calls of this process, oldest first."""
    with _lock:
        return sorted(_open, key=lambda call: call.start)


def call_count() -> int:
    """Number of calls opened plus calls closed: it does not change while the controller hangs."""
    return _counts["opened"] + _counts["closed"]
