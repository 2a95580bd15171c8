"""CPU cores, load, heap and garbage collector of this process."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

# Upper limit of `load_factor`: a load average may include processes that wait for a disk.
_MAX_LOAD_FACTOR = 10.0
# Calls of a method until the process is warm: the first one loads modules, compiles and captures graphs.
_WARM_CALLS = 2
_M_ARENA_MAX = -8  # of malloc.h


def available_cores() -> int:
    """Return the number of cores in the affinity mask of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> float:
    """Return the cores that this process may use, as limited by its affinity and its container."""
    cores = float(available_cores())
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        cores = cores if limit == "max" else min(cores, int(limit) / int(period))
    return max(cores, 0.1)


def split_cores(ranks: int) -> str:
    """Divide the available cores among ranks, in the format of vLLM and SGLang: "0,1|2,3"."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    parts = [cores[rank * share % len(cores) :][:share] for rank in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)


def load_factor() -> float:
    """Return the runnable processes per usable core (average of a minute, limited to 1 … 10), to scale time limits."""
    if not hasattr(os, "getloadavg"):
        return 1.0
    return min(_MAX_LOAD_FACTOR, max(1.0, os.getloadavg()[0] / usable_cores()))


def describe_load() -> str:
    """Return the load as text, for error messages."""
    if not hasattr(os, "getloadavg"):
        return f"{usable_cores():g} cores"
    return f"load average {os.getloadavg()[0]:.1f} on {usable_cores():g} cores"


def freeze_gc() -> None:
    """Exclude all current objects from later garbage collections.

    A process with torch, transformers and compiled graphs holds about a million objects. Every full collection visits
    all of them and stops the process for half a second; a thousand short responses per step trigger one every few
    steps. Frozen objects are still freed when their last reference goes, unless they become part of a reference cycle:
    call this a few times in the life of a process, not in every step.
    """
    gc.collect()
    gc.freeze()


class WarmupGcFreeze:
    """Calls `freeze_gc` after the second call of each method of a worker."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def after_call(self, method: str) -> None:
        """Count a finished call."""
        self._calls[method] += 1
        if self._calls[method] == _WARM_CALLS:
            freeze_gc()


def use_single_heap() -> None:
    """Let all threads allocate from one heap, which `trim_heap` can return completely; does nothing without glibc.

    By default glibc creates heaps for threads, and keeps up to 64 MB of free memory at the end of each: `malloc_trim`
    returns the end of the first heap only. Call it before the process starts threads.
    """
    mallopt = _libc_function("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Return freed heap memory to the operating system; does nothing without glibc."""
    trim = _libc_function("malloc_trim")
    if trim is not None:
        trim(0)


@functools.cache
def _libc_function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)
