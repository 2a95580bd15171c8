"""The Ray actor of one rank: its start, `RayRankHost` in the worker process, its handle, and the wait for its end.

Actors of a pool may be started before the worker group that uses them.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.config.devices import memory_state
from verl.protocol import DataProto
from verl.single_controller.base.decorator import BatchShard
from verl.single_controller.base.worker import RankHost, RankInfo
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    Failure,
    RankHandle,
    WorkerDiedError,
    result_or_raise,
)
from verl.single_controller.ray.batch_ref import BatchRef
from verl.single_controller.ray.column_store import StoredRows, attach_bundle, bundle_rows, store_rows, store_with
from verl.single_controller.ray.rank_monitor import NodeInspector, RankProcess, explain_death
from verl.single_controller.ray.resource_pool import RayResourcePool, ResourceError, StartedRanks, describe_cluster
from verl.utils.compile_cache import open_compile_cache
from verl.utils.import_utils import register_user_modules_by_value
from verl.utils.logging_setup import quiet_warnings
from verl.utils.network import interface_of
from verl.utils.resources import WarmupGcFreeze
from verl.utils.stacks import enable_stack_dumps

logger = logging.getLogger(__name__)

NAMESPACE = "verl"
_INLINE_BYTES = 64 * 1024
_POLL_S = 0.5
_DEATH_TIMEOUT_S = 30.0
_PROCESS_POLL_S = 0.05
# Exceptions of Ray for a dead process. OutOfMemoryError (killed by Ray's memory monitor) is not a RayActorError.
_DIED = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError)

# Threads of the control lane. Every request that waits in an engine occupies one; abort and health need a free one.
_CONTROL_THREADS = 256


class RayRankHost(RankHost):
    """The actor of one rank. Batches arrive by reference, and results stay in the object store."""

    def __init__(self) -> None:
        super().__init__()
        self._gc_freeze = WarmupGcFreeze()

    def describe(self) -> Any:
        """The tuple of the base class, then Ray's node id and the node's `MemoryState`."""
        enable_stack_dumps()
        return (*super().describe(), ray.get_runtime_context().get_node_id(), memory_state())

    def prepare(self) -> tuple[str, int]:
        """Address of this node and a free port on it, for the rendezvous on rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def preload(self, modules: Sequence[str], compiles: bool = False) -> None:
        """Import modules before `construct` needs them. `compiles`: also import torch's compiler, which otherwise the
        first step imports."""
        if compiles:
            open_compile_cache()  # first: the compiler sets the default places of its caches
            modules = [*modules, "torch._inductor.compile_fx"]
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError as error:  # raised again where the module is used
                logger.debug("not imported in advance: %s", error)

    def construct(self, info: RankInfo, cls_with_init: ClassWithInitArgs) -> Failure | None:
        quiet_warnings()
        os.environ.update(info.environment())
        _set_gloo_interface()
        if info.device_name == "cpu":
            _set_cpu_threads(info.local_world_size)
        return super().construct(info, cls_with_init)

    def call(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        # Shards are resolved first, because the base class reads their row counts.
        try:
            args = [resolve_argument(arg) for arg in args]
            kwargs = {key: resolve_argument(arg) for key, arg in kwargs.items()}
        except Exception as error:  # noqa: BLE001 - returned to the controller, which raises it
            return Failure.from_exception(error)
        try:
            return super().call(role, method, args, kwargs, lane)
        finally:
            if lane == "compute":  # control calls run in the middle of a training step
                self._gc_freeze.after_call(f"{role}.{method}")

    def call_streamed(
        self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str
    ) -> Iterator[Any]:
        """As `call`; yields the columns of the returned batch, then the output, which refers to columns by number.

        Streamed columns are owned by the caller, so they outlive this process.
        """
        columns: list[Any] = []

        def add_column(content: Any) -> int:
            columns.append(content)
            return len(columns) - 1

        with store_with(add_column):
            output = self.call(role, method, args, kwargs, lane)
        for content in [*columns, output]:  # noqa: UP028 - Ray resumes generators by `send`, which lists do not have
            yield content

    def call_rows(self, role: str, method: str, args: list[Any]) -> tuple[Any, Any]:
        """Run a control method that returns (value, DataProto or None).

        Returns two objects: (value, description of the rows), and the rows' tensor columns.
        """
        output = self.call(role, method, args, {}, "control")
        if isinstance(output, Failure):
            return output, None
        value, rows = output
        if rows is None:
            return (value, None), None
        stored, contents = bundle_rows(rows)
        return (value, stored), contents

    def call_plain(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        """As `call`, for callers that use `ray.get`: returns values instead of references, and raises exceptions."""
        output = result_or_raise(self.call(role, method, args, kwargs, lane))
        return BatchRef.from_stored(output).fetch() if isinstance(output, StoredRows) else output

    def receive(self, data: DataProto) -> DataProto:
        return data.fetch() if isinstance(data, BatchRef) else data

    def send(self, output: Any, shard: BatchShard | None) -> Any:
        if type(output) is not DataProto:
            return output
        lengths = shard.data.lengths if shard is not None and isinstance(shard.data, BatchRef) else None
        if lengths is not None and shard is not None and shard.fillers:
            lengths = lengths[: len(lengths) - shard.fillers]
        return store_rows(output, lengths)


@dataclass(frozen=True)
class RayRankHandle(RankHandle):
    """Handle of a rank's actor."""

    actor: Any
    role: str
    rank: int
    host: str

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.host})"

    def notify(self, method: str, *args: Any) -> None:
        self._send(method, args)

    def call(self, method: str, *args: Any) -> Any:
        return self._result(method, self._send(method, args))

    def call_rows(self, method: str, *args: Any) -> tuple[Any, StoredRows | None]:
        call = self.actor.call_rows.options(concurrency_group="control", num_returns=2)
        reply, bundle = call.remote(self.role, method, list(args))
        value, rows = self._result(method, reply)
        return value, None if rows is None else attach_bundle(rows, bundle)

    def _result(self, method: str, ref: Any) -> Any:
        output = get_outcomes([ref])[0]
        if isinstance(output, Exception):
            raise WorkerDiedError(explain_death(output)[0], self.role, self.rank, self.host, method, str(output))
        return result_or_raise(output)

    def _send(self, method: str, args: tuple[Any, ...]) -> Any:
        return on_lane(self.actor, "call", "control").remote(self.role, method, list(args), {}, "control")


@dataclass(frozen=True)
class StoredArgument:
    """A large argument in the object store. It is wrapped, because Ray delays a call until its plain references are
    available."""

    ref: Any


def store_argument(arg: Any, stored: dict[int, StoredArgument]) -> Any:
    """Replace a large batch by a reference. `stored` caches references by id, so that a batch is stored only once."""
    data = arg.data if isinstance(arg, BatchShard) else arg
    if type(data) is not DataProto or data.nbytes < _INLINE_BYTES:
        return arg
    if id(data) not in stored:
        stored[id(data)] = StoredArgument(ray.put(data))
    reference = stored[id(data)]
    return replace(arg, data=reference) if isinstance(arg, BatchShard) else reference  # type: ignore[arg-type]


def resolve_argument(arg: Any) -> Any:
    """The inverse of `store_argument`, in the worker."""
    if isinstance(arg, BatchShard) and isinstance(arg.data, StoredArgument):
        return replace(arg, data=ray.get(arg.data.ref))
    return ray.get(arg.ref) if isinstance(arg, StoredArgument) else arg


def on_lane(actor: Any, method: str, lane: str) -> Any:
    """The actor's method, to be called on a lane: `.remote(...)`."""
    return getattr(actor, method).options(concurrency_group=lane)


def named_actor(name: str) -> Any:
    """The running actor with this name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ValueError(f"no running worker named {name!r}. Was its group started with detached=True?") from error


def get_outcomes(refs: list[Any]) -> list[Any]:
    """Return the output of every call. If Ray cannot deliver an output, its place has Ray's exception if the process
    died, else a Failure."""
    try:
        return ray.get(refs)
    except _DIED as error:
        outcome: Any = error
    except ray.exceptions.RayError as error:
        outcome = Failure(f"{type(error).__name__} before the method ran", str(error), None)
    return [outcome] if len(refs) == 1 else [get_outcomes([ref])[0] for ref in refs]


def find_dead(workers: Sequence[Any]) -> list[int]:
    """Ranks whose actor is dead or does not reply for `_DEATH_TIMEOUT_S`."""
    refs = [on_lane(worker, "describe", "control").remote() for worker in workers]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_DEATH_TIMEOUT_S)
    alive = {ref for ref in ready if not isinstance(get_outcomes([ref])[0], Exception)}
    return [rank for rank, ref in enumerate(refs) if ref not in alive]


def wait_until_dead(workers: Sequence[Any], processes: Sequence[RankProcess]) -> None:
    """Wait until Ray has released the actors' names, and until the processes have ended, which frees their devices."""
    alive, deadline = list(workers), time.monotonic() + _DEATH_TIMEOUT_S
    while alive and time.monotonic() < deadline:
        refs = [on_lane(worker, "describe", "control").remote() for worker in alive]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_POLL_S)
        dead = {ref for ref in ready if isinstance(get_outcomes([ref])[0], Exception)}
        alive = [worker for worker, ref in zip(alive, refs, strict=True) if ref not in dead]
    nodes = NodeInspector()
    for process in processes:
        while time.monotonic() < deadline and not _has_ended(nodes, process):
            time.sleep(_PROCESS_POLL_S)


def _has_ended(nodes: NodeInspector, process: RankProcess) -> bool:
    inspection = nodes.inspect(process)
    return inspection is None or inspection[0] in ("gone", "ended")


def wait_until_alive(workers: Sequence[Any], timeout: float, pool: str) -> None:
    """Raise a ResourceError if a worker has not started after `timeout` seconds."""
    refs = [on_lane(worker, "describe", "control").remote() for worker in workers]
    _, waiting = ray.wait(refs, num_returns=len(refs), timeout=timeout)
    if waiting:
        missing = f"{len(waiting)} of {len(refs)} rank(s) did not start in {timeout:.0f} s"
        raise ResourceError(f"resource pool {pool!r}: {missing}. {describe_cluster()}")


def _set_gloo_interface() -> None:
    """On several nodes, make gloo use the node's network interface: many systems resolve the host name to loopback."""
    if sum(node["Alive"] for node in ray.nodes()) > 1:
        name = interface_of(ray.util.get_node_ip_address())
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _set_cpu_threads(ranks_on_node: int) -> None:
    """Divide the cores of the node among its ranks; by default Ray gives every process one thread."""
    threads = max(1, (os.cpu_count() or 1) // ranks_on_node)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)


def new_prefix() -> str:
    """Return a prefix for the names of a group's actors."""
    return f"group-{uuid.uuid4().hex[:6]}"


def start_actors(
    pool: RayResourcePool,
    prefix: str,
    ranks: Sequence[int],
    *,
    detached: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Start the processes of these ranks and return their actors, without waiting for them.

    `env`: environment variables, set before anything is imported.
    """
    # Also send the content of user files that were loaded before Ray was imported.
    register_user_modules_by_value()
    host = ray.remote(concurrency_groups={"compute": 1, "control": _CONTROL_THREADS, "heartbeat": 1})(RayRankHost)
    bundles = [
        (group, i) for group, count in zip(pool.get_placement_groups(), pool.store, strict=True) for i in range(count)
    ]
    return [
        host.options(
            name=f"{prefix}:{rank}",
            namespace=NAMESPACE,
            lifetime="detached" if detached else None,
            num_cpus=0,
            num_gpus=1.0 / pool.max_colocate_count if pool.use_gpu else 0,
            runtime_env={"env_vars": dict(env)} if env else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(*bundles[rank]),
        ).remote()
        for rank in ranks
    ]


def start_early(pools: Sequence[Any], modules: Sequence[str], compiles: bool = False) -> None:
    """Reserve these pools and start the processes of their ranks, which import `modules` in the background, and with
    `compiles` the compiler.

    The first worker group of a pool uses its processes; `release` of the pool ends those that no group has used. Raises
    ResourceError if the cluster is too small. Pools of other classes are ignored.
    """
    own = [pool for pool in pools if isinstance(pool, RayResourcePool) and not pool.detached and pool.started is None]
    for pool in own:
        pool.get_placement_groups()
    for pool in own:
        prefix = new_prefix()
        pool.started = StartedRanks(prefix, start_actors(pool, prefix, range(pool.world_size)))
        for actor in pool.started.actors:
            on_lane(actor, "preload", "compute").remote(list(modules), compiles)
