"""Hosts and jobs of the RolloutManager.

RolloutHosts: connections to hosts (`LoopHost`), their collector threads, and lost hosts. ManagedJob: submitted rows and
finished trajectories; batches are built from them without copies.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import ray

from verl.config import ActorRolloutRefConfig
from verl.protocol import DataProto, object_array
from verl.single_controller.base.worker_group import RankHandle, WorkerError
from verl.single_controller.ray.batch_ref import BatchRef
from verl.single_controller.ray.column_store import (
    StoredRows,
    attach_bundle,
    bundle_rows,
    concat_columns,
    read_columns,
    take_rows,
)
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.types.request import Output, join_outputs
from verl.types.trajectory import Headers, HostReply, Status, Trajectory
from verl.workers.rollout.prompts import RolloutJob, sampling_params
from verl.workers.rollout.training_rows import experts_template, trajectories_from_rows

logger = logging.getLogger(__name__)

# A `host.collect` call of a collector thread returns after this time at the latest.
COLLECT_S = 2.0
# Maximum number of hosts that are called at the same time.
_MAX_CONCURRENT_CALLS = 32

HostKind = Literal["engine", "agent"]
"""engine: the first rollout rank of a replica, for single-turn rows. agent: a loop worker."""

# Columns of a host's reply that are not copied to the batch: `join_prompt_columns` adds them.
_PROMPT_COLUMNS = ("uid", "sample_index")


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
        with_partials = self._groups.may_lose_hosts or host.kind == "agent"
        while not host.closed:
            try:
                reply, rows = host.handle.call_rows("host.collect", host.id, COLLECT_S, with_partials)
                self._on_reply(host, reply, rows)
            except Exception as error:  # noqa: BLE001 - raised in the trainer's thread
                if not host.closed:
                    host.closed = True
                    self._on_lost(host, error)
                return
            if (reply.failure is not None or reply.closed) and not host.closed:
                host.closed = True
                self._on_lost(host, None)


@dataclass(frozen=True, slots=True, eq=False)
class RowsPart:
    """The rows of all trajectories in one reply of a host."""

    stored: StoredRows
    """Tensor columns, in the object store."""
    objects: Mapping[str, np.ndarray]
    """Object columns, in this process."""


@dataclass(frozen=True, slots=True, eq=False)
class FinishedTrajectory:
    """A finished trajectory: its header, and where its training rows are."""

    name: str
    """`uid/sample_index`, see `trajectory_names`."""
    uid: str
    sample_index: int
    status: Status
    score: float | None
    """The score that its agent returned; None: the agent returned none."""
    versions: tuple[int, ...]
    """Versions of the weights that sampled its tokens."""
    last_tokens: np.ndarray
    """Response tokens of its last row: the input of reward functions."""
    part: RowsPart
    first_row: int
    """Its rows are the rows `first_row` to `first_row + row_count - 1` of `part`."""
    row_count: int


OnFinished = Callable[[Sequence[FinishedTrajectory]], None]
"""Called by the collector thread of a host."""


@dataclass(slots=True, eq=False)
class SubmittedRow:
    """A submitted row that has not finished."""

    batch: DataProto
    """The submitted batch; this row is at `index`."""
    index: int
    prompt_length: int
    kind: HostKind
    parts: list[Output] = field(default_factory=list)
    """Consecutive parts of its output, as reported. They are joined when needed: joining at every report would take
    quadratic time."""
    host: HostState | None = None
    """None: not sent yet, or the host was lost."""

    @property
    def partial(self) -> Output | None:
        """The output so far; None if the host has reported none."""
        return join_outputs(list(self.parts), self.prompt_length) if self.parts else None


@dataclass(slots=True, eq=False)
class ManagedJob:
    """A job: its unfinished rows by trajectory name, and the events that were not collected yet."""

    name: str
    meta: Mapping[str, Any]
    on_finished: OnFinished
    rows: dict[str, SubmittedRow] = field(default_factory=dict)
    inbox: queue.SimpleQueue[list[FinishedTrajectory] | HostLoss] = field(default_factory=queue.SimpleQueue)

    def next_event(self, timeout: float) -> list[FinishedTrajectory] | HostLoss | None:
        """Remove and return the next event of the inbox; block up to `timeout` seconds, then return None."""
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def take_finished(self) -> list[FinishedTrajectory]:
        """Remove and return the finished trajectories of the inbox without waiting; lost hosts stay in it."""
        finished, losses = [], []
        while not self.inbox.empty():
            event = self.inbox.get()
            if isinstance(event, HostLoss):
                losses.append(event)
            else:
                finished += event
        for loss in losses:
            self.inbox.put(loss)
        return finished

    def add_partials(self, outputs: Mapping[str, Output]) -> None:
        """Append newly reported output of unfinished rows."""
        for name, output in outputs.items():
            if (row := self.rows.get(name)) is not None:
                row.parts.append(output)


def trajectory_names(rows: DataProto) -> list[str]:
    """Return the ids of these rows, `uid/sample_index`. Raises ValueError if two rows have the same id."""
    columns = rows.non_tensor_batch
    names = [f"{uid}/{number}" for uid, number in zip(columns["uid"], columns["sample_index"], strict=True)]
    if len(set(names)) < len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"rollout: several rows have the id {repeated!r}. Make uid or sample_index unique.")
    return names


def finished_trajectories(reply: HostReply, rows: StoredRows) -> list[FinishedTrajectory]:
    """Return the finished trajectories of a host's reply, which must have headers. `rows`: their tensor columns."""
    headers = reply.headers
    assert headers is not None
    part = RowsPart(rows, {name: values for name, values in reply.objects.items() if name not in _PROMPT_COLUMNS})
    first_rows = np.cumsum([0, *headers.row_counts])
    return [
        FinishedTrajectory(
            name,
            headers.uids[number],
            int(headers.sample_indices[number]),
            headers.statuses[number],
            headers.scores[number],
            headers.versions[number],
            headers.last_tokens(number),
            part,
            int(first_rows[number]),
            int(headers.row_counts[number]),
        )
        for number, name in enumerate(headers.names)
    ]


def join_rows(finished: Sequence[FinishedTrajectory]) -> DataProto:
    """Return the training rows of these trajectories (at least one), in order; on Ray a BatchRef, whose tensor columns
    stay in the object store."""
    parts = list({id(trajectory.part): trajectory.part for trajectory in finished}.values())
    starts = np.cumsum([0, *(part.stored.rows for part in parts)])
    start_of = {id(part): int(start) for part, start in zip(parts, starts[:-1], strict=True)}
    spans = [(start_of[id(item.part)] + item.first_row, item.row_count) for item in finished]
    index = np.concatenate([np.arange(start, start + count) for start, count in spans])
    columns = take_rows(concat_columns([part.stored.columns for part in parts]), index)
    names = dict.fromkeys(name for part in parts for name in part.objects)
    objects = {name: _join_objects(name, parts)[index] for name in names}
    if isinstance(next(iter(columns.values())).refs[0].bundle, dict):  # without Ray, the tensors are in this process
        return DataProto.from_dict(read_columns(columns), objects)
    batch = BatchRef(columns, len(index), {})
    for name, values in objects.items():
        batch.non_tensor_batch[name] = values
    return batch


def read_trajectories(finished: Sequence[FinishedTrajectory]) -> list[Trajectory]:
    """Read finished trajectories with all their tokens from the object store, for a checkpoint."""
    if not finished:
        return []
    batch = join_rows(finished)
    trajectories = trajectories_from_rows(batch.fetch() if isinstance(batch, BatchRef) else batch)
    pairs = zip(trajectories, finished, strict=True)
    return [replace(trajectory, status=header.status, score=header.score) for trajectory, header in pairs]


def store_trajectories(
    trajectories: Sequence[Trajectory], policy: ActorRolloutRefConfig, meta: Mapping[str, Any], use_ray: bool
) -> list[FinishedTrajectory]:
    """Put trajectories of a checkpoint into the object store, as if a host had just finished them. `meta`: the `meta`
    of their job."""
    if not trajectories:
        return []
    job = RolloutJob("restored", meta, sampling_params(policy.rollout, meta), 0, 0)
    rows = job.pack(trajectories, experts_template(policy.model, policy.rollout))
    objects = rows.pop(non_tensor_batch_keys=list(rows.non_tensor_batch)).non_tensor_batch
    stored, bundle = bundle_rows(rows)
    reply = HostReply(headers=Headers.of(trajectories), objects=objects)
    return finished_trajectories(reply, attach_bundle(stored, ray.put(bundle) if use_ray else bundle))


def _join_objects(name: str, parts: Sequence[RowsPart]) -> np.ndarray:
    """Return an object column of all parts, with None in the rows of parts without this column."""
    columns = [part.objects.get(name, object_array([None] * part.stored.rows)) for part in parts]
    return np.concatenate(columns)
