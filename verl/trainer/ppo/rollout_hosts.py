"""RolloutHosts: connections of the RolloutManager to hosts (`LoopHost`): calls, collector threads and lost hosts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from verl.single_controller.base.errors import WorkerError
from verl.single_controller.base.worker_group import RankHandle
from verl.single_controller.ray.column_store import StoredRows
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.types.trajectory import HostReply

logger = logging.getLogger(__name__)

# A `host.collect` call of a collector thread returns after this time at the latest.
_COLLECT_S = 2.0
# Maximum number of hosts that are called at the same time.
_MAX_CONCURRENT_CALLS = 32

HostKind = Literal["engine", "agent"]
"""engine: the first rollout rank of a replica, for single-turn rows. agent: a loop worker."""


@dataclass(slots=True, eq=False)
class HostState:
    """A host, as seen by the trainer."""

    kind: HostKind
    handle: RankHandle
    id: str
    closed: bool = True
    """No collector thread runs: the host is not started yet, lost, or closed."""
    pulses: int = 0
    """Progress counter in the host's last reply."""


@dataclass(frozen=True, slots=True, eq=False)
class HostLoss:
    """The report of a lost host. `error` is None if the host itself reported a lost engine; `require_engines` then
    raises the engine's error."""

    host: HostState
    error: Exception | None


class RolloutHosts:
    """One collector thread per host receives replies. Only `connect` and `close` use the compute lane of the ranks."""

    def __init__(
        self,
        groups: WorkerGroups,
        on_reply: Callable[[HostState, HostReply, StoredRows | None], None],
        on_lost: Callable[[HostState, Exception | None], None],
    ) -> None:
        """`on_reply` is called by collector threads; `on_lost(host, error)`: see `HostLoss`."""
        self._groups, self._on_reply, self._on_lost = groups, on_reply, on_lost
        self.all: list[HostState] = []
        self.lock = threading.Lock()
        """Held while a reply is processed and while hosts are closed: no reply of a closed host is processed."""

    def of_kind(self, kind: HostKind) -> list[HostState]:
        """Return the hosts of this kind."""
        return [host for host in self.all if host.kind == kind]

    def least_loaded(self, kind: HostKind, loads: Mapping[HostState | None, int]) -> HostState:
        """Return the host of this kind with the fewest rows. `loads`: number of unfinished rows per host."""
        return min(self.of_kind(kind), key=lambda host: loads.get(host, 0))

    def assign_by_position(self, kinds: Mapping[str, HostKind]) -> dict[str, HostState]:
        """Assign rows to hosts: every host gets a contiguous, equal share of the rows of its kind, so that the
        assignment does not depend on timing. `kinds`: kind of host by row id, in order."""
        assigned: dict[str, HostState] = {}
        for kind in dict.fromkeys(kinds.values()):
            names = [name for name, row_kind in kinds.items() if row_kind == kind]
            hosts = self.of_kind(kind)
            for host, indices in zip(hosts, np.array_split(np.arange(len(names)), len(hosts) or 1), strict=False):
                assigned |= {names[index]: host for index in indices}
        return assigned

    def connect(self) -> list[HostState]:
        """Open generation on engines and loop workers. Return the hosts that were lost since the last call; new hosts
        are `closed` until `start_collecting`."""
        replicas = self._groups.open_generation()
        hosts = [self._host("engine", handle, host_id) for handle, host_id in replicas]
        handles = [handle for handle, _ in replicas]
        agents = self._groups.agents
        for rank in range(0 if agents is None else agents.world_size):
            handle = agents.handle(rank)
            hosts.append(self._host("agent", handle, handle.call("open_host", handles)))
        lost = [host for host in self.all if host not in hosts]
        self.all = hosts
        self.abandon(lost)
        return lost

    def _host(self, kind: HostKind, handle: RankHandle, host_id: str) -> HostState:
        """Return the host with this id. If the connection was lost but the process lives, the host is reset: it is
        unknown which calls it received, and a `collect` call may still be running there."""
        known = next((host for host in self.all if host.id == host_id), None)
        if known is not None and not known.closed:
            return known
        return HostState(kind, handle, host_id if known is None else handle.call("host.reset"))

    def start_collecting(self, host: HostState) -> None:
        """Start the collector thread of a new host."""
        host.closed = False
        threading.Thread(target=self._collect_from, args=(host,), name="rollout-collect", daemon=True).start()

    def abandon(self, hosts: Sequence[HostState] | None = None) -> None:
        """Process no further replies of these hosts (default: all)."""
        with self.lock:
            for host in self.all if hosts is None else hosts:
                host.closed = True

    def close(self) -> None:
        """Close all hosts and generation; raise the error of a failed engine, if there is one."""
        hosts, self.all = self.all, []
        self.abandon(hosts)
        for host in hosts:
            if host.kind == "agent":
                self.call_if_alive(host, "close_host")
        if hosts or self._groups.generation_open:
            self._groups.close_generation()

    def call_all(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Call `call(*arguments)` for all of these arguments, on Ray concurrently: every call takes milliseconds."""
        if len(calls) > 1 and self._groups.uses_ray:
            with ThreadPoolExecutor(min(len(calls), _MAX_CONCURRENT_CALLS), "rollout-call") as pool:
                for future in [pool.submit(self.call, *arguments) for arguments in calls]:
                    future.result()
        else:
            for arguments in calls:
                self.call(*arguments)

    def call(self, host: HostState, method: str, *args: Any) -> None:
        """Call a method of a host. A WorkerError closes the host and is reported to `on_lost`."""
        try:
            host.handle.call(method, *args)
        except WorkerError as error:
            host.closed = True  # even if its process lives: it has missed this call
            self._on_lost(host, error)

    def call_if_alive(self, host: HostState, method: str, *args: Any) -> None:
        """Call a method that ends work. A WorkerError is ignored: the work of a lost host has already ended."""
        try:
            host.handle.call(method, *args)
        except WorkerError as error:
            logger.debug("%s of %s: %s", method, host.handle, error)

    def _collect_from(self, host: HostState) -> None:
        """Receive replies of a host until it is closed or lost. Runs in the host's collector thread."""
        keep_partials = self._groups.may_lose_hosts or host.kind == "agent"
        while not host.closed:
            try:
                reply, rows = host.handle.call_rows("host.collect", host.id, _COLLECT_S, keep_partials)
                self._on_reply(host, reply, rows)
            except Exception as error:  # noqa: BLE001 - raised in the trainer's thread
                if not host.closed:
                    host.closed = True
                    self._on_lost(host, error)
                return
            if (reply.failure is not None or reply.closed) and not host.closed:
                host.closed = True
                self._on_lost(host, None)
