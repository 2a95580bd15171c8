"""Classify the processes of a run from outside, by ancestry and command line."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from verl.utils.process_tree import children, with_descendants

_PROGRAM = "verl.trainer.main_ppo"
_FORK_SERVER = "verl.utils.process_pool.fork_server"
_RAY_OTHERS = ("dashboard.py", "log_monitor.py", "monitor.py", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


def by_kind(first: int, actor_ranks: Collection[int] | None) -> dict[str, list[int]]:
    """Pids by kind; `first`: the process that the user started; `actor_ranks`: pids of ranks with training state."""
    pids: dict[str, list[int]] = defaultdict(list)
    for pid in with_descendants(first):
        kind = _kind(pid, first, actor_ranks)
        if kind is not None:
            pids[kind].append(pid)
    if "driver" not in pids:
        pids["driver"] = pids.pop("supervisor", [])
    return dict(pids)


def _kind(pid: int, first: int, actor_ranks: Collection[int] | None) -> str | None:
    words = command_line(pid)
    line = " ".join(words)
    if not words or state_of(pid) == "Z":
        return None
    if pid == first:
        return "supervisor"
    if words[1:3] == ["-m", _PROGRAM]:
        return "driver" if parent_of(pid) == first else None
    if line.startswith("ray::RayRankHost"):
        return "rank" if actor_ranks is None or pid in actor_ranks else "replica"
    if line.startswith("ray::TaskRunner"):
        return "controller"
    if _FORK_SERVER in line:
        return "scorer" if _FORK_SERVER in " ".join(command_line(parent_of(pid))) else "fork server"
    if Path(words[0]).name in ("gcs_server", "raylet"):
        return {"gcs_server": "GCS", "raylet": "raylet"}[Path(words[0]).name]
    if any(name in line for name in _RAY_OTHERS):
        return "Ray's others"
    return None


def command_line(pid: int) -> list[str]:
    """The command line of a process; [] if it does not exist."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def parent_of(pid: int) -> int:
    return int((_stat(pid) or ["", "0"])[1])


def state_of(pid: int) -> str | None:
    """R, S, D, T (stopped), Z (zombie); None if it does not exist."""
    return (_stat(pid) or [None])[0]


def identity(pid: int) -> tuple[int, str] | None:
    """Identifies a process even if its pid is reused later."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else (pid, fields[19])


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return whether the process existed."""
    if state_of(pid) in (None, "Z"):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def leftover_processes(before: Collection[int]) -> list[str]:
    """Processes that a finished run left running (adopted by this process); `before`: its own children."""
    for pid in children(os.getpid()):
        if pid not in before and state_of(pid) == "Z":
            os.waitpid(pid, 0)
    orphans = [pid for pid in children(os.getpid()) if pid not in before and state_of(pid) not in (None, "Z")]
    return [f"{pid} {' '.join(command_line(pid))[:80]}" for child in orphans for pid in with_descendants(child)]


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
