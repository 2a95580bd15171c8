"""RayWorkerGroup: one Ray actor per rank, with one or several roles."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from verl.single_controller.base.decorator import MethodSpec
from verl.single_controller.base.heartbeat import OpenCall
from verl.single_controller.base.worker import RankInfo
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    Failure,
    WorkerCallError,
    WorkerDiedError,
    WorkerGroup,
    check_prefixes,
    specs_of,
)
from verl.single_controller.ray.actors import (
    RayRankHandle,
    StoredArgument,
    find_dead,
    get_outcomes,
    named_actor,
    new_prefix,
    on_lane,
    start_actors,
    store_argument,
    wait_until_alive,
    wait_until_dead,
)
from verl.single_controller.ray.batch_ref import BatchRef
from verl.single_controller.ray.column_store import StoredRows, resolve_refs
from verl.single_controller.ray.rank_monitor import (
    NodeInspector,
    RankProcess,
    RankQueries,
    RecentMemory,
    explain_death,
)
from verl.single_controller.ray.resource_pool import (
    RayNode,
    RayResourcePool,
    ResourceError,
    describe_cluster,
    lost_ranks,
)
from verl.utils.resources import load_factor

logger = logging.getLogger(__name__)

GetOutcomes = Callable[[list[Any]], list[Any]]
"""Returns the outcomes of ended calls, given by references: outputs, exceptions or failures."""

# Interval in which a wait for outputs checks whether it was aborted.
_POLL_S = 0.5
# After the first failure of a call: wait for further failures, to raise the death of a process rather than its effects.
_DEATH_GRACE_S = 1.0
_RESTART_TIMEOUT_S = 300.0
_recent_memory = RecentMemory()


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class (plain, or wrapped with ray.remote) and its constructor arguments."""


@dataclass(frozen=True)
class _StartPlan:
    """The arguments that the processes of a group are started and restarted with."""

    pool: RayResourcePool
    cls_with_init: ClassWithInitArgs
    device: str
    env: dict[str, str]
    collective_timeout: float


class RayWorkerGroup(WorkerGroup):
    """The ranks of a role (or of several colocated roles) as Ray actors.

    Batches that calls return stay in the object store: the result is a `BatchRef`, which behaves like a DataProto.
    """

    expendable = False
    """Whether its processes hold no training state: a rank that hangs may be killed, and the group restarted."""

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        *,
        name_prefix: str | None = None,
        detached: bool = False,
        device_name: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        collective_timeout: float = 1800.0,
        expendable: bool = False,
    ) -> None:
        """`worker_env`: environment variables of the worker processes, set before anything is imported.
        `collective_timeout`: timeout of torch collectives in seconds.
        `expendable`: ranks have no state that `restart` would lose, and returned batches outlive the processes.
        `detached`: the processes outlive the driver; `from_detached` connects to them by `name_prefix`.
        """
        if resource_pool is None or ray_cls_with_init is None:
            raise ValueError("RayWorkerGroup: pass a resource_pool and a ray_cls_with_init, or use from_detached.")
        started = None if name_prefix or detached or worker_env else resource_pool.take_started()
        self.name_prefix = name_prefix or (new_prefix() if started is None else started.prefix)
        self._detached = detached or resource_pool.detached
        self.expendable = expendable
        device = device_name or ("cuda" if resource_pool.use_gpu else "cpu")
        env = _checked_env(worker_env or {})
        plan = _StartPlan(resource_pool, ray_cls_with_init, device, env, collective_timeout)
        self._plan: _StartPlan | None = plan
        # Lists are shared with the groups that `spawn` returns, so that all of them see the changes of `restart`.
        self._workers: list[Any] = []
        self._nodes: list[RayNode] = []
        self._broken: list[WorkerDiedError] = []
        self._master: list[Any] = []
        """`master_address` and `master_port`."""
        self._killed: set[int] = set()
        """Ranks killed by `shutdown`; Ray may report them as alive for a while."""
        self._queries = RankQueries(self._workers)
        self._hosts = ["?"] * resource_pool.world_size
        self._set_roles(specs_of(ray_cls_with_init), resource_pool.world_size)
        ranks = range(resource_pool.world_size)
        if started is None:
            self._workers += [None] * len(ranks)
            self._start_processes(plan, ranks)
        else:
            self._workers += started.actors
            self._construct_roles(plan, ranks)

    @classmethod
    def reserve(cls, pools: Sequence[Any]) -> None:
        for pool in pools:
            pool.get_placement_groups()

    @classmethod
    def cpu_pool(cls, process_on_nodes: Sequence[int], name: str) -> RayResourcePool:
        return RayResourcePool(process_on_nodes, use_gpu=False, name_prefix=name)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
    ) -> RayWorkerGroup:
        """Attach to a running group, by its prefix or by its actors' names."""
        if name_prefix is None and not worker_names:
            raise ValueError("RayWorkerGroup.from_detached: pass name_prefix or worker_names.")
        names = list(worker_names or [f"{name_prefix}:0"])
        workers = [named_actor(name) for name in names]
        info, specs, *_ = ray.get(on_lane(workers[0], "describe", "control").remote())
        if worker_names is None:
            workers += [named_actor(f"{name_prefix}:{rank}") for rank in range(1, info.world_size)]
        if len(workers) != info.world_size:
            raise ValueError(
                f"RayWorkerGroup.from_detached: {len(workers)} names for a group of {info.world_size} ranks."
            )
        group = object.__new__(cls)
        group.name_prefix = name_prefix or names[0]
        group._detached, group._workers, group._broken, group._nodes = True, workers, [], []
        group._killed, group._plan = set(), None
        group._queries = RankQueries(workers)
        group._set_roles(specs_of(ray_cls_with_init) if ray_cls_with_init else specs, info.world_size)
        group._hosts = group._query_hosts(workers)
        group._master = [info.master_addr, info.master_port]
        return group

    @property
    def workers(self) -> list[Any]:
        """The actor handles, by rank."""
        return list(self._workers)

    @property
    def master_address(self) -> str:
        """The host of rank 0, where the ranks' process group meets."""
        return self._master[0]

    @property
    def master_port(self) -> int:
        """The port of the process group at `master_address`."""
        return self._master[1]

    @property
    def worker_names(self) -> list[str]:
        """The actors' names, by rank: argument of `from_detached`."""
        return [f"{self.name_prefix}:{rank}" for rank in range(self.world_size)]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        return {prefix: self._view(prefix) for prefix in check_prefixes(prefix_set, self._all_specs)}

    def handle(self, rank: int) -> RayRankHandle:
        return RayRankHandle(self._workers[rank], self.role, rank, self._hosts[rank])

    def shutdown(self) -> None:
        """Kill the actors."""
        for rank, worker in enumerate(self._workers):
            ray.kill(worker, no_restart=True)
            self._killed.add(rank)

    def restart(self, alone: bool = False) -> list[int]:
        """Kill the remaining processes, start new ones and construct their roles. Returns the new ranks.

        `alone`: restart only dead ranks; for ranks that do not form a process group.

        The group and the groups of its roles stay the same objects. Raises a WorkerError or a ResourceError if a
        process does not start; calls on the group then still raise the error from before the restart.
        """
        if self._plan is None:
            raise ValueError(
                f"{self.role}: a group of RayWorkerGroup.from_detached cannot restart its ranks. Restart the group that"
                " started them."
            )
        lost, processes = self._broken[:], self.processes
        ranks = sorted({*find_dead(self._workers), *self._killed}) if alone else list(range(self.world_size))
        replaced = [self._workers[rank] for rank in ranks]
        for worker in replaced:
            ray.kill(worker, no_restart=True)
        # The processes of ranks that never started are unknown.
        wait_until_dead(replaced, [processes[rank] for rank in ranks] if processes else [])
        if lost_ranks(self._nodes) is not None:
            raise ResourceError(f"{self.role}: a node of its ranks is lost. {describe_cluster()}")
        self._broken.clear()
        self._killed.clear()
        try:
            self._start_processes(self._plan, ranks, _RESTART_TIMEOUT_S * load_factor())
        except BaseException:
            self._broken += lost
            raise
        return ranks

    @property
    def processes(self) -> list[RankProcess]:
        """The process of every rank."""
        return self._queries.processes

    def query_ranks(self, method: str, timeout: float) -> list[Any]:
        replies = self._queries.query("call", (self.role, method, [], {}, "control"), "control", timeout)
        return [None if isinstance(reply, Exception) else reply for reply in replies]

    def heartbeats(self, all_threads: bool, timeout: float) -> list[Any]:
        """The `Heartbeat` of every rank, or Ray's exception if it died; None: no reply after `timeout` seconds."""
        return self._queries.query("heartbeat", (all_threads,), "heartbeat", timeout)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Object refs of the ranks' plain results, for `ray.get`."""
        return self._plain_refs(range(self.world_size), method, args, kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The object ref of rank 0's plain result, for `ray.get`."""
        return self._plain_refs([0], method, args, kwargs)[0]

    # ---------------------------------------------------------------- starting

    def _start_processes(self, plan: _StartPlan, ranks: Sequence[int], timeout: float | None = None) -> None:
        actors = start_actors(plan.pool, self.name_prefix, ranks, detached=self._detached, env=plan.env)
        for rank, actor in zip(ranks, actors, strict=True):
            self._workers[rank] = actor
        self._construct_roles(plan, ranks, timeout)

    def _construct_roles(self, plan: _StartPlan, ranks: Sequence[int], timeout: float | None = None) -> None:
        self._nodes[:] = plan.pool.nodes_by_rank()
        self._queries.reset()
        try:
            if timeout is not None:
                wait_until_alive(self._workers, timeout, plan.pool.name_prefix)
            self._construct(plan, ranks)
        except BaseException:
            self.shutdown()
            raise

    def _construct(self, plan: _StartPlan, ranks: Sequence[int]) -> None:
        pool = plan.pool
        self._hosts[:] = self._query_hosts(self._workers)
        if 0 in ranks:
            addresses = self._wait("start", {0: on_lane(self._workers[0], "prepare", "control").remote()})
            self._master[:] = addresses[0]
        address, port = self._master
        infos = [
            RankInfo(rank, pool.world_size, local_rank, local_size, address, port, plan.device, plan.collective_timeout)
            for rank, (local_rank, local_size) in enumerate(
                zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True)
            )
        ]
        roles = plan.cls_with_init
        refs = {rank: on_lane(self._workers[rank], "construct", "compute").remote(infos[rank], roles) for rank in ranks}
        self._wait("__init__", refs)

    def _query_hosts(self, workers: list[Any]) -> list[str]:
        """Read the process of every rank; return descriptions of host and pid, by rank."""
        refs = {rank: on_lane(worker, "describe", "control").remote() for rank, worker in enumerate(workers)}
        descriptions = self._wait("start", refs)
        self._queries.processes = [
            RankProcess(node, host, pid, memory) for _, _, host, pid, node, memory in descriptions
        ]
        return [f"{process.host} pid {process.pid}" for process in self._queries.processes]

    def _set_roles(self, all_specs: dict[str, dict[str, MethodSpec]], world_size: int) -> None:
        """Initialise the group with the methods of its role. A group of several roles has none; `spawn` adds them."""
        self._all_specs = all_specs
        role, specs = next(iter(all_specs.items())) if len(all_specs) == 1 else ("+".join(all_specs), {})
        super().__init__(role, specs, world_size)

    def _view(self, role: str) -> RayWorkerGroup:
        """Return the group of one of the colocated roles: it shares the state of this one, but has its own methods."""
        view = object.__new__(type(self))
        view.__dict__.update({key: value for key, value in self.__dict__.items() if key not in self._specs})
        WorkerGroup.__init__(view, role, self._all_specs[role], self.world_size)
        return view

    # ---------------------------------------------------------------- calling

    def _submit(
        self, ranks: Sequence[int], method: str, args: list[list[Any]], kwargs: dict[str, list[Any]], lane: str
    ) -> Callable[[], list[Any]]:
        entry = "call_streamed" if self.expendable and lane == "compute" else "call"
        refs, call = self._start_calls(entry, ranks, method, args, kwargs, lane), OpenCall(self, method)
        if entry == "call":
            return lambda: [_as_batch(output) for output in self._wait(method, refs, call)]
        streams = {stream.completed(): stream for stream in refs.values()}
        ends = dict(zip(refs, streams, strict=True))
        return lambda: self._wait(
            method, ends, call, lambda ready: [_stream_outcome(end, streams[end]) for end in ready]
        )

    def _plain_refs(self, ranks: Sequence[int], method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Start a call; return references to results that are values themselves, not stored batches."""
        rank_args, rank_kwargs = self._args_of_ranks(args, kwargs)
        return list(
            self._start_calls("call_plain", ranks, method, rank_args, rank_kwargs, self._lane_of(method)).values()
        )

    def _start_calls(
        self,
        entry: str,
        ranks: Sequence[int],
        method: str,
        args: list[list[Any]],
        kwargs: dict[str, list[Any]],
        lane: str,
    ) -> dict[int, Any]:
        """Call the actor method `entry`, which executes `method` of the role; return Ray's reference by rank."""
        if self._broken:
            raise self._broken[0]
        stored: dict[int, StoredArgument] = {}
        refs = {}
        for rank in ranks:
            own_args = [store_argument(arg[rank], stored) for arg in args]
            own_kwargs = {key: store_argument(arg[rank], stored) for key, arg in kwargs.items()}
            refs[rank] = on_lane(self._workers[rank], entry, lane).remote(self.role, method, own_args, own_kwargs, lane)
        return refs

    def _wait(
        self,
        method: str,
        refs: dict[int, Any],
        call: OpenCall | None = None,
        outcomes: GetOutcomes = get_outcomes,
    ) -> list[Any]:
        """Return the outputs in the order of ranks. The first failure ends the wait: other ranks may be blocked in a
        collective with the failed rank."""
        call = call or OpenCall(self, method)
        try:
            return self._collect_outputs(method, refs, call, outcomes)
        finally:
            call.close()

    def _collect_outputs(self, method: str, refs: dict[int, Any], call: OpenCall, outcomes: GetOutcomes) -> list[Any]:
        outputs: dict[int, Any] = {}
        failures: dict[int, Exception | Failure] = {}
        deadline = None
        while len(outputs) + len(failures) < len(refs) and (deadline is None or time.monotonic() < deadline):
            pending = {ref: rank for rank, ref in refs.items() if rank not in outputs and rank not in failures}
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_POLL_S, fetch_local=False)
            _recent_memory.sample()
            if call.abort_error is not None:
                raise call.abort_error
            for ref, output in zip(ready, outcomes(ready), strict=True):
                (failures if isinstance(output, Exception | Failure) else outputs)[pending[ref]] = output
            if failures and deadline is None:
                # Errors of peers ("connection closed") often arrive before Ray reports the death that caused them.
                deadline = time.monotonic() + _DEATH_GRACE_S
        if failures:
            self._raise_failures(method, failures)
        return [outputs[rank] for rank in sorted(outputs)]

    def _raise_failures(self, method: str, failures: dict[int, Exception | Failure]) -> None:
        """Raise WorkerDiedError if a process has ended (a failure is then Ray's exception), else WorkerCallError."""
        died = next((rank for rank, failure in failures.items() if isinstance(failure, Exception)), None)
        if (lost := lost_ranks(self._nodes)) is not None:
            died, cause, advice = lost.first, lost.describe(self.role), ""
        elif died is not None:
            cause, advice = self._explain_death(failures[died], died)
        if died is not None:
            detail = "\n".join(str(failure) for failure in failures.values())
            error = WorkerDiedError(cause, self.role, died, self._hosts[died], method, detail)
            error.advice = advice
            self._broken.append(error)
            raise error
        raised = [(rank, failure) for rank, failure in sorted(failures.items()) if isinstance(failure, Failure)]
        (first, failure), *rest = raised
        others = [WorkerCallError(other, self.role, rank, self._hosts[rank], method) for rank, other in rest]
        raise WorkerCallError(failure, self.role, first, self._hosts[first], method, others)

    def _explain_death(self, failure: Exception | Failure, rank: int) -> tuple[str, str]:
        """Return cause and advice, from the memory of the rank's node before and after its death."""
        if len(self.processes) <= rank:  # it died during its start
            return explain_death(failure)
        process = self.processes[rank]
        memory = NodeInspector().memory(process)
        if process.node != ray.get_runtime_context().get_node_id():  # _recent_memory samples this node only
            return explain_death(failure, process.memory, memory)
        return explain_death(failure, _recent_memory.first or process.memory, memory, _recent_memory.lowest)


def _as_batch(output: Any) -> Any:
    """Return stored rows as a batch, any other output unchanged."""
    return BatchRef.from_stored(output) if isinstance(output, StoredRows) else output


def _stream_outcome(end: Any, stream: Any) -> Any:
    """Return the outcome of a `call_streamed`; `end`: the reference that is ready when the call has ended."""
    failure = get_outcomes([end])[0]
    if isinstance(failure, Exception | Failure):
        return failure
    *columns, last = stream
    output = get_outcomes([last])[0]
    return _as_batch(resolve_refs(output, columns) if isinstance(output, StoredRows) else output)


def _checked_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables as strings; ValueError for those that the group sets itself."""
    reserved = sorted(env.keys() & RankInfo(0, 1, 0, 1, "", 0).environment().keys())
    if reserved:
        raise ValueError(f"worker_env: the group sets {', '.join(reserved)} for every rank. Remove them.")
    return {name: str(value) for name, value in env.items()}
