"""Functions that the workers of benchmarks/process_pool.py call; workers import this file, so its imports are small."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time


def reward(text: str, truth: str) -> float:
    """A typical rule-based reward."""
    return float(text.rpartition("####")[2].strip() == truth)


def hold_the_gil() -> None:
    ctypes.PyDLL(None).usleep(1_000_000_000)


def compute_forever() -> None:
    while True:
        pass


def exit_process(code: int) -> None:
    os._exit(code)


def crash() -> None:
    ctypes.string_at(0)


def start_child(file: str, hang: bool) -> None:
    """Start a process in a new session and write its pid to `file`."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(file, "w") as out:
        out.write(str(child.pid))
    time.sleep(1000 if hang else 0)


def inherited_state(descriptor: int) -> str:
    """State of the caller's process that this worker has inherited."""
    inherited = [name for name in ("torch", "ray") if name in sys.modules]
    inherited += ["threads"] if threading.active_count() > 2 else []
    try:
        os.fstat(descriptor)
        inherited.append("file descriptors")
    except OSError:
        pass
    return ", ".join(inherited) or "nothing"


def memory_mb() -> float:
    """Private memory of this process."""
    with open("/proc/self/smaps_rollup") as file:
        lines = [line.split() for line in file]
    return sum(int(line[1]) for line in lines if line[0].startswith("Private")) / 1024
