"""Processes and all they started: found, watched and ended together. On other systems than Linux less is known."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl


def available_cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_ranks(ranks: int) -> str:
    """Those processors shared out, as engines of other make spell it: "0,1|2,3"."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    parts = [cores[rank * share % len(cores) :][:share] for rank in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)


def children(pid: int) -> list[int]:
    """The processes that `pid` started or adopted; empty where the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return found


def family(pid: int) -> list[int]:
    """`pid` and all that descends from it."""
    found = [pid]
    for member in found:
        found += children(member)
    return found


def states(pid: int) -> list[str]:
    """A letter for each thread of `pid`, its first one first, and of all that descends from it; empty: not known.

    R runs or could, S and D wait, Z has ended, T is stopped.
    """
    found = []
    for member in family(pid):
        with contextlib.suppress(OSError):
            threads = sorted(os.listdir(f"/proc/{member}/task"), key=lambda thread: thread != str(member))
            for thread in threads:
                found += (_stat(f"{member}/task/{thread}") or [])[:1]
    return found


def standstill(pid: int) -> str | None:
    """Why a process itself cannot run: gone, ended, stopped, traced; None: it can, or nothing is known of it."""
    if not os.path.isdir("/proc/self"):
        return None
    state = _stat(str(pid))
    return "gone" if state is None else {"T": "stopped", "t": "traced", "Z": "ended", "X": "ended"}.get(state[0])


def cpu_seconds(pid: int) -> float | None:
    """Processor time of `pid`, of all that descends from it, and of what it waited for; None: not known."""
    if _stat(str(pid)) is None:
        return None
    ticks = sum(int(tick) for member in family(pid) for tick in (_stat(str(member)) or [])[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def starved_seconds(pid: int) -> float | None:
    """How long the first thread of `pid` could have run but had to wait for a processor; None: not known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def command_of(pid: int) -> bytes:
    """Its command line, or what it calls itself; empty where the system does not say."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_family(pid: int) -> None:
    """SIGKILL to `pid`, its process group if it leads one, and all that descends from it."""
    members = family(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)


def end_family(pid: int) -> None:
    """As `kill_family`, for programs of ours: Python's trackers of resources are left. When all others have ended they
    remove what those have left in shared memory, and end."""
    members = {*family(pid), *_group(pid)}
    _kill_but_trackers([*members - {pid}, pid])  # itself last: it may be the caller


def end_group(pid: int, within: float = 2.0) -> None:
    """SIGKILL to the process group that `pid` leads or led; its trackers of resources have `within` seconds to end."""
    _kill_but_trackers(_group(pid))
    deadline = time.monotonic() + within
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.01)
        os.killpg(pid, signal.SIGKILL)


def _group(pid: int) -> list[int]:
    found = filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc/self") else ())
    return [int(name) for name in found if (_stat(name) or [])[2:3] == [str(pid)]]


def _kill_but_trackers(pids: Iterable[int]) -> None:
    for pid in pids:
        if b"resource_tracker" not in command_of(pid):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)


def ended_how(code: int | None) -> str:
    """What an exit code says, as a sentence goes on after the process's name."""
    if code is None or code >= 0:
        return "has ended" if code is None else f"ended with exit code {code}"
    hint = " (the machine ran out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def watch_workers(on_end: Callable[[str], None]) -> None:
    """Of the processes that this one has started by `multiprocessing` so far, `on_end` is told of the first that ends,
    and how, in a thread of its own. Whoever has started them waits for them as before."""
    import multiprocessing.connection  # here: its exit function would slow down every program of the sandbox

    workers = multiprocessing.active_children()

    def run() -> None:
        ended = multiprocessing.connection.wait([worker.sentinel for worker in workers])
        worker = next(worker for worker in workers if worker.sentinel in ended)
        for _ in range(20):
            if worker.exitcode is not None:
                break
            time.sleep(0.05)  # whoever else waits for it was first, and is about to write it down
        on_end(f"process {worker.pid} ({worker.name}) {ended_how(worker.exitcode)}")

    if workers:
        threading.Thread(target=run, name="watch-workers", daemon=True).start()


def adopt_orphans() -> None:
    """From here on, descendants whose parent ended become children of this process instead of the system's first."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Have this process killed when the thread that forked it ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def wake_with_parent() -> None:
    """Have this process go on, should it be stopped, when the thread that forked it ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)


def data_bytes() -> int | None:
    """What this process counts against RLIMIT_DATA now: its private writable memory, touched or not."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _stat(place: str) -> list[str] | None:
    """The fields of a stat file in /proc from the state on; the name before it may hold anything."""
    try:
        return Path(f"/proc/{place}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
