"""Why a worker process died, from evidence: Ray's memory monitor, the kernel's OOM counter, memory before the death."""

from __future__ import annotations

import re
import time
from collections import deque

import ray

from verl.config.devices import MemoryState, memory_state
from verl.single_controller.base.errors import Failure

__all__ = ["RecentMemory", "death"]

_USED = re.compile(r"was ([\d.]+ ?\w+ used / [\d.]+ ?\w+) limit")
_ADVICE = "Lower the micro-batch sizes of its phase, turn offloading off, or use fewer ranks per machine."
# Share of available memory below which a death is attributed to memory; Ray's monitor acts at 95 % in use.
_LOW_MEMORY = 0.05
# The samples cover ten seconds.
_SAMPLES, _SAMPLE_INTERVAL_S = 20, 0.5
_GB = 2**30


class RecentMemory:
    """Recent samples of host memory on the controller's node: after a death, the memory is already free again."""

    def __init__(self) -> None:
        self._states: deque[MemoryState] = deque(maxlen=_SAMPLES)
        self._next = 0.0

    def sample(self) -> None:
        """Record the state now, at most every `_SAMPLE_INTERVAL_S` seconds."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + _SAMPLE_INTERVAL_S
            self._states.append(memory_state())

    @property
    def first(self) -> MemoryState | None:
        """The oldest sample; None if there is only one, which may have been taken after the death."""
        return self._states[0] if len(self._states) > 1 else None

    @property
    def lowest(self) -> MemoryState | None:
        """The sample with the least available memory."""
        return min(self._states, key=lambda state: state.available, default=None)


def death(
    error: Exception | Failure,
    before: MemoryState | None = None,
    now: MemoryState | None = None,
    lowest: MemoryState | None = None,
) -> tuple[str, str]:
    """Return the cause of a worker's death as text, and the advice in it ("": memory is not the cause).

    `before` and `now`: memory of its node before and after the death; `lowest`: the sample with the least available.
    """
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        used = _USED.search(str(error))
        return _out_of_memory(
            f"Ray's memory monitor killed it, out of host memory ({used[1] if used else 'size not reported'})"
        )
    if "connection error" not in str(error):
        return "worker process died", ""
    lowest = lowest or now
    memory = "" if lowest is None else f"{lowest.available / _GB:.1f} of {lowest.total / _GB:.1f} GB were available"
    kills = host_kills = None
    if before is not None and now is not None:
        kills = _growth(before.oom_kills, now.oom_kills)
        host_kills = _growth(before.host_oom_kills, now.host_oom_kills)
    if kills or (kills is None and host_kills):
        return _out_of_memory(f"killed (signal 9), out of host memory: the kernel's OOM killer ran ({memory})")
    if host_kills:
        return _out_of_memory(
            "killed (signal 9) or crashed, probably out of host memory: the kernel's OOM killer ran on this machine,"
            f" in another cgroup ({memory})"
        )
    counted = kills is not None or host_kills is not None
    if not counted and lowest is not None and lowest.available < _LOW_MEMORY * lowest.total:
        return _out_of_memory(f"killed (signal 9) or crashed, probably out of host memory ({memory})")
    evidence = [] if not counted else ["the kernel's OOM killer did not run"]
    evidence += [memory] if memory else []
    if not evidence:
        return "worker process died: killed (signal 9) or crashed.", ""
    how = f"killed by signal 9 from another process, or crashed; not out of memory ({', '.join(evidence)})"
    return f"worker process died: {how}.", ""


def _growth(before: int | None, now: int | None) -> int | None:
    """Return the difference of two counters; None: one is unknown."""
    return None if before is None or now is None else now - before


def _out_of_memory(how: str) -> tuple[str, str]:
    return f"worker process died: {how}. {_ADVICE}", _ADVICE
