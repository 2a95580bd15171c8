"""Health of ranks on Ray: queries with a timeout, reports on ranks that do not reply, and causes of their death."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.config.devices import MemoryState, memory_state
from verl.single_controller.base.heartbeat import Heartbeat, RankReport, relevant_stacks
from verl.single_controller.base.worker_group import Failure
from verl.utils.process_tree import children, command_line, why_not_running, with_descendants
from verl.utils.stacks import Stack, stacks_of

logger = logging.getLogger(__name__)

_NODE_TIMEOUT_S = 20.0
_REPORT_STATES = {"stopped": "stopped", "traced": "traced", "ended": "dead", "gone": "dead"}
# Command lines of Ray's worker processes, after and before an actor is assigned to them.
_RAY_WORKERS = (b"ray::", b"default_worker.py")

_MEMORY_USED = re.compile(r"was ([\d.]+ ?\w+ used / [\d.]+ ?\w+) limit")
_MEMORY_ADVICE = "Lower the micro-batch sizes of its phase, turn offloading off, or use fewer ranks per machine."
# Share of available memory below which a death is attributed to memory; Ray's monitor acts at 95 % in use.
_LOW_MEMORY = 0.05
# The samples cover ten seconds.
_SAMPLES, SAMPLE_INTERVAL_S = 20, 0.5
_GB = 2**30


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank: Ray's node id, host name and process id."""

    node: str
    host: str
    pid: int
    memory: MemoryState | None = field(default=None, compare=False)
    """Memory of its node when the rank started."""


class RankQueries:
    """Sends queries to the actors of a group. At most one query of a kind is pending per actor, so that they do not
    accumulate at an actor that does not reply."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        self._pending: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()
        self.processes: list[RankProcess] = []

    def query(self, method: str, args: tuple[Any, ...], lane: str, timeout: float) -> list[Any]:
        """For each rank: the reply, Ray's exception, or None if there is no reply after `timeout` seconds.

        A late reply is returned by the next call with the same arguments.
        """
        keys = [(rank, method, repr(args)) for rank in range(len(self._actors))]
        with self._lock:
            for key in keys:
                if key not in self._pending:
                    entry = getattr(self._actors[key[0]], method).options(concurrency_group=lane)
                    self._pending[key] = entry.remote(*args)
            refs = [self._pending[key] for key in keys]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=timeout, fetch_local=False)[0])
        return [self._reply(ref, key) if ref in ready else None for ref, key in zip(refs, keys, strict=True)]

    def reset(self) -> None:
        """Forget pending queries and processes, because the actors were replaced."""
        with self._lock:
            self._pending.clear()
            self.processes = []

    def _reply(self, ref: Any, key: tuple[Any, ...]) -> Any:
        with self._lock:
            self._pending.pop(key, None)
        try:
            reply = ray.get(ref, timeout=1)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return error
        if isinstance(reply, Failure):
            raise reply.exception() or RuntimeError(reply.summary)
        return reply


class RankReports:
    """Creates reports on the ranks of groups. Keeps the last heartbeats, for ranks that no longer reply."""

    def __init__(self) -> None:
        self._last: dict[RankProcess, tuple[float, Heartbeat]] = {}
        self.nodes = NodeInspector()

    def collect(self, group: Any, since: float, all_threads: bool, timeout: float) -> list[RankReport]:
        """Return a report on every rank of a group.

        Heartbeats received before `since` belong to an earlier call and are not used. Processes on this node are always
        checked for being stopped or dead; processes on other nodes only if they do not reply.
        """
        # Read once: a restart replaces the list.
        this_node, processes = ray.get_runtime_context().get_node_id(), group.processes
        states = [why_not_running(process.pid) if process.node == this_node else None for process in processes]
        heartbeats = group.heartbeats(all_threads, timeout)
        reports = []
        for rank, (process, heartbeat, state) in enumerate(zip(processes, heartbeats, states, strict=True)):
            report = RankReport(group.role, rank, process.host, process.pid, "runs")
            reports.append(self._report(report, process, heartbeat, state, since, all_threads))
        return reports

    def _report(
        self,
        report: RankReport,
        process: RankProcess,
        reply: Any,
        state: str | None,
        since: float,
        with_stacks: bool,
    ) -> RankReport:
        """Complete `report`. `reply`: the heartbeat of the process, an exception of Ray, or None (no reply in time).
        `state`: why the process is not running; None: it runs, or it is on another node."""
        if isinstance(reply, Heartbeat) and state is None:
            self._last[process] = time.monotonic(), reply
            return replace(report, heartbeat=reply)
        received_at, last = self._last.get(process, (0.0, Heartbeat()))
        report = replace(report, heartbeat=last if received_at >= since else Heartbeat(thread=last.thread))
        if isinstance(reply, Exception):
            state = "gone"
        stacks: dict[int, Stack] = {}
        if state is None:
            inspection = self.nodes.inspect(process, with_stacks)
            if inspection is None:
                return replace(report, state="unreachable")
            state, stacks = inspection
        if stacks:
            shown = relevant_stacks(stacks, last.thread or next(iter(stacks)))
            report = replace(report, heartbeat=replace(report.heartbeat, stacks=shown))
        return replace(report, state=_REPORT_STATES.get(state or "", "silent"))


Inspection = tuple[str | None, dict[int, Stack]]
"""Why a process is not running (None: it runs), and its stacks by thread."""


class NodeInspector:
    """Inspects processes on all nodes; on another node through a small actor, which is started on first use."""

    def __init__(self) -> None:
        self._agents: dict[str, Any] = {}

    def inspect(self, process: RankProcess, with_stacks: bool = False) -> Inspection | None:
        """Inspect a process; None: its node does not reply.

        On this node, stacks are read only with `with_stacks`, because that interrupts the process.
        """
        if process.node == ray.get_runtime_context().get_node_id():
            return _inspect(process.pid) if with_stacks else (why_not_running(process.pid), {})
        return self._call(process.node, "inspect", process.pid)

    def kill(self, process: RankProcess) -> None:
        """Send SIGKILL, the only signal that ends a stopped process, to a process on any node."""
        if process.node == ray.get_runtime_context().get_node_id():
            _kill(process.pid)
        else:
            self._call(process.node, "kill", process.pid)

    def memory(self, process: RankProcess) -> MemoryState | None:
        """Return the memory state of a rank's node; None: the node does not reply."""
        if process.node == ray.get_runtime_context().get_node_id():
            return memory_state()
        return self._call(process.node, "memory")

    def find_stopped_worker(self) -> tuple[str, int, str] | None:
        """(host, pid, state) of a stopped or traced worker process of Ray, on this node or another, or None."""
        this_node = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != this_node]
        replies = (self._call(node, "find_stopped_worker") for node in others)
        return _find_stopped_worker() or next(filter(None, replies), None)

    def _call(self, node: str, method: str, *args: Any) -> Any:
        if node not in self._agents:
            on_node = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            self._agents[node] = ray.remote(num_cpus=0)(_NodeAgent).options(scheduling_strategy=on_node).remote()
        ref = getattr(self._agents[node], method).remote(*args)
        try:
            return ray.get(ref, timeout=_NODE_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            logger.debug("node %s: %r", node, error)
            del self._agents[node]
            return None


class _NodeAgent:
    """Actor of a NodeInspector on another node."""

    def inspect(self, pid: int) -> Inspection:
        return _inspect(pid)

    def memory(self) -> MemoryState:
        return memory_state()

    def find_stopped_worker(self) -> tuple[str, int, str] | None:
        return _find_stopped_worker()

    def kill(self, pid: int) -> None:
        _kill(pid)


def _inspect(pid: int) -> Inspection:
    state = why_not_running(pid)
    return state, {} if state is not None else stacks_of(pid)


def _find_stopped_worker() -> tuple[str, int, str] | None:
    """Return host, pid and state of a stopped Ray worker on this node. Workers are children of the raylet, like this
    actor, or descendants of the driver that started Ray."""
    for pid in sorted({*children(os.getppid()), *with_descendants(os.getpid())} - {os.getpid()}):
        state = why_not_running(pid)
        if state in ("stopped", "traced") and any(name in command_line(pid) for name in _RAY_WORKERS):
            return socket.gethostname(), pid, state
    return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class RecentMemory:
    """Recent samples of host memory on the controller's node: after a death, the memory is already free again."""

    def __init__(self) -> None:
        self._states: deque[MemoryState] = deque(maxlen=_SAMPLES)
        self._next = 0.0

    def sample(self) -> None:
        """Record the state now, at most every `SAMPLE_INTERVAL_S` seconds."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + SAMPLE_INTERVAL_S
            self._states.append(memory_state())

    @property
    def first(self) -> MemoryState | None:
        """The oldest sample; None if there is only one, which may have been taken after the death."""
        return self._states[0] if len(self._states) > 1 else None

    @property
    def lowest(self) -> MemoryState | None:
        """The sample with the least available memory."""
        return min(self._states, key=lambda state: state.available, default=None)


def explain_death(
    error: Exception | Failure,
    before: MemoryState | None = None,
    now: MemoryState | None = None,
    lowest: MemoryState | None = None,
) -> tuple[str, str]:
    """Return the cause of a worker's death as text, and the advice in it ("": memory is not the cause).

    `before` and `now`: memory of its node before and after the death; `lowest`: the sample with the least available.
    """
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        used = _MEMORY_USED.search(str(error))
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
    if kills:
        return _out_of_memory(f"killed (signal 9), out of host memory: the kernel's OOM killer ran ({memory})")
    if host_kills:  # may be the kill of another program, such as one in a sandbox
        where = "on this machine" if kills is None else "on this machine, in another cgroup"
        return _out_of_memory(
            f"killed (signal 9) or crashed, probably out of host memory: the kernel's OOM killer ran {where} ({memory})"
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
    return f"worker process died: {how}. {_MEMORY_ADVICE}", _MEMORY_ADVICE
