"""What benchmarks/process_pool.py has its workers do. Workers import this file: nothing heavy."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time


def reward(text: str, truth: str) -> float:
    """As small as rewards are."""
    return float(text.rpartition("####")[2].strip() == truth)


def hold_the_gil() -> None:
    ctypes.PyDLL(None).usleep(1_000_000_000)


def compute_for_ever() -> None:
    while True:
        pass


def leave(code: int) -> None:
    os._exit(code)


def crash() -> None:
    ctypes.string_at(0)


def start_a_child(file: str, hang: bool) -> None:
    """A process in a session of its own, whose id goes into the file."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(file, "w") as out:
        out.write(str(child.pid))
    time.sleep(1000 if hang else 0)


def surroundings(descriptor: int) -> str:
    """What of the caller's process is here."""
    found = [name for name in ("torch", "ray") if name in sys.modules]
    found += ["threads"] if threading.active_count() > 2 else []
    try:
        os.fstat(descriptor)
        found.append("file descriptors")
    except OSError:
        pass
    return ", ".join(found) or "nothing"


def memory_mb() -> float:
    """What this process has for itself alone."""
    with open("/proc/self/smaps_rollup") as file:
        lines = [line.split() for line in file]
    return sum(int(line[1]) for line in lines if line[0].startswith("Private")) / 1024
