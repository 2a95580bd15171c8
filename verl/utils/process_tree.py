"""Processes and their descendants: list, watch and kill them. On systems other than Linux less is known."""

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
_TRACKER_SECONDS = 2.0


def children(pid: int) -> list[int]:
    """Return the processes that `pid` started or adopted; empty if not known."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return pids


def with_descendants(pid: int) -> list[int]:
    """Return `pid` and all its descendants."""
    pids = [pid]
    for member in pids:
        pids += children(member)
    return pids


def thread_states(pid: int) -> list[str]:
    """Return the state letter of every thread of `pid` (its main thread first) and of its descendants.

    R: running or runnable, S and D: waiting, Z: ended, T: stopped. Empty if not known.
    """
    states = []
    for member in with_descendants(pid):
        with contextlib.suppress(OSError):
            threads = sorted(os.listdir(f"/proc/{member}/task"), key=lambda thread: thread != str(member))
            for thread in threads:
                states += (_stat(f"{member}/task/{thread}") or [])[:1]
    return states


def why_not_running(pid: int) -> str | None:
    """Return why a process cannot run: gone, ended, stopped or traced. None: it can, or it is not known."""
    if not os.path.isdir("/proc/self"):
        return None
    state = _stat(str(pid))
    return "gone" if state is None else {"T": "stopped", "t": "traced", "Z": "ended", "X": "ended"}.get(state[0])


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of `pid`, its descendants and the children it has waited for; None if not known."""
    if _stat(str(pid)) is None:
        return None
    ticks = sum(int(tick) for member in with_descendants(pid) for tick in (_stat(str(member)) or [])[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_wait_seconds(pid: int) -> float | None:
    """Return how long the main thread of `pid` was runnable but waited for a core; None if not known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def command_line(pid: int) -> bytes:
    """Return the command line of a process, or the title it set; empty if not known."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_tree(pid: int) -> None:
    """Send SIGKILL to `pid`, to its process group if it leads one, and to all descendants."""
    members = with_descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)


def kill_tree_but_trackers(pid: int) -> None:
    """Send SIGKILL to `pid`, its group and its descendants, except Python's resource trackers.

    When all others have ended, the trackers remove their shared memory and end.
    """
    members = {*with_descendants(pid), *_group_members(pid)}
    _kill_but_trackers([*members - {pid}, pid])  # itself last: it may be the caller


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group that `pid` leads or led; resource trackers get two seconds to end."""
    _kill_but_trackers(_group_members(pid))
    deadline = time.monotonic() + _TRACKER_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.01)
        os.killpg(pid, signal.SIGKILL)


def _group_members(pid: int) -> list[int]:
    pids = filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc/self") else ())
    return [int(name) for name in pids if (_stat(name) or [])[2:3] == [str(pid)]]


def _kill_but_trackers(pids: Iterable[int]) -> None:
    for pid in pids:
        if b"resource_tracker" not in command_line(pid):
            with contextlib.suppress(OSError):  # already ended
                os.kill(pid, signal.SIGKILL)


def describe_exit(code: int | None) -> str:
    """Return the meaning of an exit code as the predicate of a sentence: "ended with exit code 1"."""
    if code is None or code >= 0:
        return "has ended" if code is None else f"ended with exit code {code}"
    hint = " (the machine ran out of memory?)" if code == -signal.SIGKILL else ""
    names = {number.value: number.name for number in signal.Signals}  # without most of the real-time signals
    return f"was killed by {names.get(-code, f'signal {-code}')}{hint}"


def watch_child_processes(on_end: Callable[[str], None]) -> None:
    """Call `on_end(description)` when the first of the current `multiprocessing` children ends.

    Runs in its own thread. The code that started the children can still wait for them.
    """
    import multiprocessing.connection  # not above: its exit function would slow down every program of the sandbox

    workers = multiprocessing.active_children()

    def run() -> None:
        ended = multiprocessing.connection.wait([worker.sentinel for worker in workers])
        worker = next(worker for worker in workers if worker.sentinel in ended)
        for _ in range(20):
            if worker.exitcode is not None:
                break
            time.sleep(0.05)  # another thread has waited for it and is about to store the exit code
        on_end(f"process {worker.pid} ({worker.name}) {describe_exit(worker.exitcode)}")

    if workers:
        threading.Thread(target=run, name="watch-workers", daemon=True).start()


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (child subreaper), instead of process 1."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process killed when the thread that forked it ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def continue_with_parent_death() -> None:
    """Have this process continue, if it is stopped, when the thread that forked it ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)


def resident_bytes() -> int:
    """Return the resident memory of this process that no file backs, in bytes; 0 if not known."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def data_bytes() -> int | None:
    """Return the bytes of this process that count against RLIMIT_DATA: private writable memory, touched or not."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _stat(entry: str) -> list[str] | None:
    """The fields of /proc/<entry>/stat from the state on; the name before them may contain anything."""
    try:
        return Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
