"""Questions to ranks that are asked beside their work, with a limit: a rank that cannot answer holds up nobody."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.config.devices import MemoryState, memory_state
from verl.single_controller.base.beat import Beat, RankReport, telling_stacks
from verl.single_controller.base.errors import Failure
from verl.utils.process_tree import children, command_line, why_not_running, with_descendants
from verl.utils.stacks import Stack, stacks_of

logger = logging.getLogger(__name__)

_START_S = 20.0
_STATES = {"stopped": "stopped", "traced": "traced", "ended": "dead", "gone": "dead"}
# How processes that Ray starts for actors are called, before and after they know for which.
_RAY_WORKERS = (b"ray::", b"default_worker.py")


@dataclass(frozen=True)
class RankProcess:
    """Where a rank runs: Ray's name of its node, host name, process."""

    node: str
    host: str
    pid: int
    memory: MemoryState | None = field(default=None, compare=False)
    """Memory of its node when the rank started."""


class Questions:
    """To the actors of a group. One question of a kind is under way to each: none pile up where nobody answers."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        self._asked: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()
        self.processes: list[RankProcess] = []

    def ask(self, method: str, args: tuple[Any, ...], lane: str, within: float) -> list[Any]:
        """By rank: the answer, the exception that Ray has of it, or None. An answer that came late is given next."""
        names = [(rank, method, repr(args)) for rank in range(len(self._actors))]
        with self._lock:
            for name in names:
                if name not in self._asked:
                    entry = getattr(self._actors[name[0]], method).options(concurrency_group=lane)
                    self._asked[name] = entry.remote(*args)
            refs = [self._asked[name] for name in names]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=within, fetch_local=False)[0])
        return [self._answer(ref, name) if ref in ready else None for ref, name in zip(refs, names, strict=True)]

    def drop(self) -> None:
        """The actors are others now: what the earlier ones were asked, nobody answers."""
        with self._lock:
            self._asked.clear()
            self.processes = []

    def _answer(self, ref: Any, name: tuple[Any, ...]) -> Any:
        with self._lock:
            self._asked.pop(name, None)
        try:
            answer = ray.get(ref, timeout=1)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return error
        if isinstance(answer, Failure):
            raise answer.exception() or RuntimeError(answer.summary)
        return answer


class RankReports:
    """What is known of the ranks of groups; keeps what they said last, for when they say nothing any more."""

    def __init__(self) -> None:
        self._last: dict[RankProcess, tuple[float, Beat]] = {}
        self._nodes = Nodes()

    def of(self, group: Any, since: float, every_thread: bool, within: float) -> list[RankReport]:
        """Of every rank of a group; what one said before `since` (of another call) does not count.

        Processes of this node are looked at even if they do not answer.
        """
        here, processes = ray.get_runtime_context().get_node_id(), group.processes  # which a restart replaces
        states = [why_not_running(process.pid) if process.node == here else None for process in processes]
        beats = group.beats(every_thread, within)
        reports = [RankReport(group.role, rank, each.host, each.pid, "runs") for rank, each in enumerate(processes)]
        return [
            self._report(*known, since, every_thread) for known in zip(reports, processes, beats, states, strict=True)
        ]

    def standing(self) -> tuple[str, int, str] | None:
        """(host, pid, state) of a process that Ray has started for some rank, and that cannot run."""
        return self._nodes.standing()

    def kill(self, process: RankProcess) -> None:
        """SIGKILL: a stopped process takes no other."""
        self._nodes.kill(process)

    def _report(
        self, report: RankReport, process: RankProcess, beat: Any, state: str | None, since: float, stacks_too: bool
    ) -> RankReport:
        if isinstance(beat, Beat) and state is None:
            self._last[process] = time.monotonic(), beat
            return replace(report, beat=beat)
        told, known = self._last.get(process, (0.0, Beat()))
        report = replace(report, beat=known if told >= since else Beat(thread=known.thread))
        if isinstance(beat, Exception):
            state = "gone"
        stacks: dict[int, Stack] = {}
        if state is None:
            found = self._nodes.look(process, stacks_too)
            if found is None:
                return replace(report, state="unreachable")
            state, stacks = found
        if stacks:
            seen = telling_stacks(stacks, known.thread or next(iter(stacks)))
            report = replace(report, beat=replace(report.beat, stacks=seen))
        return replace(report, state=_STATES.get(state or "", "silent"))


Look = tuple[str | None, dict[int, Stack]]


def look_at(pid: int) -> Look:
    """Why a process of this machine cannot run, if so, and its stacks."""
    state = why_not_running(pid)
    return state, {} if state is not None else stacks_of(pid)


def standing_here() -> tuple[str, int, str] | None:
    """A process that Ray has started for work on this machine and that cannot run: (host, pid, state).

    They are the children of Ray's raylet, as an actor is, or descend from whoever has started Ray.
    """
    for pid in sorted({*children(os.getppid()), *with_descendants(os.getpid())} - {os.getpid()}):
        state = why_not_running(pid)
        if state in ("stopped", "traced") and any(name in command_line(pid) for name in _RAY_WORKERS):
            return socket.gethostname(), pid, state
    return None


class Nodes:
    """Eyes on other nodes: a small actor there, started when it is first needed."""

    def __init__(self) -> None:
        self._eyes: dict[str, Any] = {}

    def look(self, process: RankProcess, stacks_too: bool = False) -> Look | None:
        """None: the node does not answer. Stacks, which disturb a process, are taken on this node only if asked for."""
        if process.node == ray.get_runtime_context().get_node_id():
            return look_at(process.pid) if stacks_too else (why_not_running(process.pid), {})
        return self._ask(process.node, "look", process.pid)

    def kill(self, process: RankProcess) -> None:
        """SIGKILL, wherever it is."""
        if process.node == ray.get_runtime_context().get_node_id():
            _kill(process.pid)
        else:
            self._ask(process.node, "kill", process.pid)

    def memory(self, process: RankProcess) -> MemoryState | None:
        """Return the memory state of a rank's node; None: the node does not answer."""
        if process.node == ray.get_runtime_context().get_node_id():
            return memory_state()
        return self._ask(process.node, "memory")

    def standing(self) -> tuple[str, int, str] | None:
        """Of all nodes, this one first."""
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        return standing_here() or next(filter(None, (self._ask(node, "standing") for node in others)), None)

    def _ask(self, node: str, method: str, *args: Any) -> Any:
        if node not in self._eyes:
            there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            self._eyes[node] = ray.remote(num_cpus=0)(_Eyes).options(scheduling_strategy=there).remote()
        ref = getattr(self._eyes[node], method).remote(*args)
        try:
            return ray.get(ref, timeout=_START_S)
        except ray.exceptions.RayError as error:
            logger.debug("node %s: %r", node, error)
            del self._eyes[node]
            return None


class _Eyes:
    """On another node."""

    def look(self, pid: int) -> Look:
        return look_at(pid)

    def memory(self) -> MemoryState:
        return memory_state()

    def standing(self) -> tuple[str, int, str] | None:
        return standing_here()

    def kill(self, pid: int) -> None:
        _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
