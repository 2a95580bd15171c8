"""The load of this machine, as a factor for time limits."""

from __future__ import annotations

import os
from pathlib import Path

# Bounded: a load average may include processes that wait for a disk.
_MAX_FACTOR = 10.0


def load_factor() -> float:
    """Return the runnable processes per usable core, averaged over a minute: at least 1, at most 10."""
    if not hasattr(os, "getloadavg"):
        return 1.0
    return min(_MAX_FACTOR, max(1.0, os.getloadavg()[0] / usable_cores()))


def usable_cores() -> float:
    """Return the cores that this process may use, as limited by its affinity and its container."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        cores = cores if limit == "max" else min(cores, int(limit) / int(period))
    return max(cores, 0.1)


def describe_load() -> str:
    """Return the load as text, for error messages."""
    if not hasattr(os, "getloadavg"):
        return f"{usable_cores():g} cores"
    return f"load average {os.getloadavg()[0]:.1f} on {usable_cores():g} cores"
