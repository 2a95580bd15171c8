"""RayWorkerGroup: one Ray actor per rank, hosting one or several roles."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.config.devices import host_memory_available
from verl.protocol import DataProto
from verl.single_controller.base.decorator import MethodSpec
from verl.single_controller.base.dispatch import Shard
from verl.single_controller.base.errors import Failure, WorkerCallError, WorkerDiedError
from verl.single_controller.base.host import RankHost
from verl.single_controller.base.open_calls import OpenCall
from verl.single_controller.base.worker import RankInfo
from verl.single_controller.base.worker_group import ClassWithInitArgs, WorkerGroup, check_prefixes, specs_of
from verl.single_controller.ray.asking import Questions, RankProcess
from verl.single_controller.ray.batch_ref import BatchRef
from verl.single_controller.ray.resource_pool import RayResourcePool, lost_ranks
from verl.single_controller.ray.stored import StoredRows, store_rows
from verl.utils.import_utils import register_user_modules_by_value
from verl.utils.logging_setup import quiet_warnings
from verl.utils.network import interface_of
from verl.utils.stacks import answer_stack_requests

logger = logging.getLogger(__name__)

NAMESPACE = "verl"
# Threads of the control lane. Requests that wait inside an engine hold one each; abort and health need a free one.
_CONTROL_THREADS = 256
_INLINE_BYTES = 64 * 1024
_POLL_S = 0.5
_BLAME_GRACE_S = 1.0
# What Ray raises of a process that is gone. Its memory monitor has a class of its own, which is no RayActorError.
_DIED = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError)
_USED = re.compile(r"was ([\d.]+ ?\w+ used / [\d.]+ ?\w+) limit")
_ADVICE = "Lower the micro-batch sizes of its phase, turn offloading off, or use fewer ranks per machine."


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class (plain, or wrapped with ray.remote) and its constructor arguments."""


class RayRankHost(RankHost):
    """The actor of one rank. Batches arrive by reference and results stay in the object store."""

    def describe(self) -> Any:
        """As the base class says, then Ray's name of the node."""
        answer_stack_requests()
        return (*super().describe(), ray.get_runtime_context().get_node_id())

    def prepare(self) -> tuple[str, int]:
        """Address of this node and a free port on it: where rank 0 will listen."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def construct(self, info: RankInfo, cls_with_init: ClassWithInitArgs) -> Failure | None:
        quiet_warnings()
        os.environ.update(info.environment())
        _use_the_nodes_network()
        if info.device_name == "cpu":
            _share_cores(info.local_world_size)
        return super().construct(info, cls_with_init)

    def call_plain(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        """As `call`, for callers that `ray.get` the result themselves: values travel whole, exceptions are Ray's."""
        output = self.call(role, method, args, kwargs, lane)
        if isinstance(output, Failure):
            raise output.exception() or RuntimeError(f"{output.summary}\n{output.traceback}")
        return BatchRef.from_stored(output).fetch() if isinstance(output, StoredRows) else output

    def receive(self, data: DataProto) -> DataProto:
        return data.fetch() if isinstance(data, BatchRef) else data

    def send(self, output: Any, shard: Shard | None) -> Any:
        if type(output) is not DataProto:
            return output
        lengths = shard.data.lengths if shard is not None and isinstance(shard.data, BatchRef) else None
        if lengths is not None and shard is not None and shard.fillers:
            lengths = lengths[: len(lengths) - shard.fillers]
        return store_rows(output, lengths)

    def call(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        # Shards come before anything else looks at them: the base class reads their row counts.
        try:
            args = [_unwrap(arg) for arg in args]
            kwargs = {key: _unwrap(arg) for key, arg in kwargs.items()}
        except Exception as error:  # noqa: BLE001 - carried to the controller, which raises it
            return Failure.of(error)
        return super().call(role, method, args, kwargs, lane)


@dataclass(frozen=True)
class _Put:
    """A large argument that lies in the object store; wrapped, so that Ray does not hold the call until it is there."""

    ref: Any


class RayWorkerGroup(WorkerGroup):
    """The ranks of a role (or of several colocated ones) as Ray actors.

    Batches that calls return stay where they were made: the result is a `BatchRef`, which behaves like a DataProto.
    """

    expendable = False
    """Its processes hold nothing that training needs: a rank that hangs may be killed, and the group started anew."""

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
    ) -> None:
        """`worker_env`: environment variables of the workers' processes, there before anything is imported.
        `collective_timeout`: seconds after which torch gives up a collective."""
        if resource_pool is None or ray_cls_with_init is None:
            raise ValueError("RayWorkerGroup: give a resource_pool and a ray_cls_with_init, or use from_detached.")
        self.name_prefix = name_prefix or f"group-{uuid.uuid4().hex[:6]}"
        self._detached = detached or resource_pool.detached
        self._workers = self._start_actors(resource_pool, _checked_env(worker_env or {}))
        self._nodes = resource_pool.nodes_by_rank()
        self._broken: list[WorkerDiedError] = []
        self._questions = Questions(self._workers)
        self._hosts = ["?"] * resource_pool.world_size
        self._set_roles(specs_of(ray_cls_with_init), resource_pool.world_size)
        device = device_name or ("cuda" if resource_pool.use_gpu else "cpu")
        try:
            self._construct(resource_pool, ray_cls_with_init, device, collective_timeout)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def reserve(cls, pools: Sequence[Any]) -> None:
        for pool in pools:
            pool.get_placement_groups()

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
    ) -> RayWorkerGroup:
        """Attach to a running group, by its prefix or by its actors' names."""
        if name_prefix is None and not worker_names:
            raise ValueError("RayWorkerGroup.from_detached: give name_prefix or worker_names.")
        names = list(worker_names or [f"{name_prefix}:0"])
        workers = [_named_actor(name) for name in names]
        info, specs, *_ = ray.get(_on(workers[0], "describe", "control").remote())
        if worker_names is None:
            workers += [_named_actor(f"{name_prefix}:{rank}") for rank in range(1, info.world_size)]
        if len(workers) != info.world_size:
            raise ValueError(
                f"RayWorkerGroup.from_detached: {len(workers)} names for a group of {info.world_size} ranks."
            )
        group = object.__new__(cls)
        group.name_prefix = name_prefix or names[0]
        group._detached, group._workers, group._broken, group._nodes = True, workers, [], []
        group._questions = Questions(workers)
        group._set_roles(specs_of(ray_cls_with_init) if ray_cls_with_init else specs, info.world_size)
        group._hosts = group._ask_hosts(workers)
        group.master_address, group.master_port = info.master_addr, info.master_port
        return group

    @property
    def workers(self) -> list[Any]:
        """The actor handles, by rank."""
        return list(self._workers)

    @property
    def worker_names(self) -> list[str]:
        """The actors' names, by rank: what `from_detached` takes."""
        return [f"{self.name_prefix}:{rank}" for rank in range(self.world_size)]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        return {prefix: self._view(prefix) for prefix in check_prefixes(prefix_set, self._all_specs)}

    def shutdown(self) -> None:
        """Kill the actors."""
        for worker in self._workers:
            ray.kill(worker, no_restart=True)

    @property
    def processes(self) -> list[RankProcess]:
        """Where every rank runs."""
        return self._questions.processes

    def ask(self, method: str, within: float) -> list[Any]:
        answers = self._questions.ask("call", (self.role, method, [], {}, "control"), "control", within)
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    def beats(self, every_thread: bool, within: float) -> list[Any]:
        """A `Beat` of every rank, or the exception that tells of its death; None: no answer in time."""
        return self._questions.ask("beat", (every_thread,), "beat", within)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Object refs of the ranks' plain results, for `ray.get`."""
        return self._plain_refs(range(self.world_size), method, args, kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The object ref of rank 0's plain result, for `ray.get`."""
        return self._plain_refs([0], method, args, kwargs)[0]

    # ---------------------------------------------------------------- starting

    def _start_actors(self, pool: RayResourcePool, env: dict[str, str]) -> list[Any]:
        # User files that were loaded before Ray was imported travel by content, too.
        register_user_modules_by_value()
        host = ray.remote(concurrency_groups={"compute": 1, "control": _CONTROL_THREADS, "beat": 1})(RayRankHost)
        places = [
            (group, i)
            for group, count in zip(pool.get_placement_groups(), pool.store, strict=True)
            for i in range(count)
        ]
        return [
            host.options(
                name=f"{self.name_prefix}:{rank}",
                namespace=NAMESPACE,
                lifetime="detached" if self._detached else None,
                num_cpus=0,
                num_gpus=1.0 / pool.max_colocate_count if pool.use_gpu else 0,
                runtime_env={"env_vars": env} if env else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote()
            for rank, (group, bundle) in enumerate(places)
        ]

    def _construct(
        self, pool: RayResourcePool, cls_with_init: ClassWithInitArgs, device: str, collective_timeout: float
    ) -> None:
        started = self._wait("start", {0: _on(self._workers[0], "prepare", "control").remote()})
        address, port = self.master_address, self.master_port = started[0]
        self._hosts = self._ask_hosts(self._workers)
        infos = [
            RankInfo(rank, pool.world_size, local_rank, local_size, address, port, device, collective_timeout)
            for rank, (local_rank, local_size) in enumerate(
                zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True)
            )
        ]
        refs = {i.rank: _on(self._workers[i.rank], "construct", "compute").remote(i, cls_with_init) for i in infos}
        self._wait("__init__", refs)

    def _ask_hosts(self, workers: list[Any]) -> list[str]:
        refs = {rank: _on(worker, "describe", "control").remote() for rank, worker in enumerate(workers)}
        found = self._wait("start", refs)
        self._questions.processes = [RankProcess(node, host, pid) for _, _, host, pid, node in found]
        return [f"{host} pid {pid}" for _, _, host, pid, _ in found]

    def _set_roles(self, all_specs: dict[str, dict[str, MethodSpec]], world_size: int) -> None:
        self._all_specs = all_specs
        role, specs = next(iter(all_specs.items())) if len(all_specs) == 1 else ("+".join(all_specs), {})
        super().__init__(role, specs, world_size)

    def _view(self, role: str) -> RayWorkerGroup:
        view = object.__new__(type(self))
        view.__dict__.update({key: value for key, value in self.__dict__.items() if key not in self._specs})
        WorkerGroup.__init__(view, role, self._all_specs[role], self.world_size)
        return view

    # ---------------------------------------------------------------- calling

    def _submit(
        self, ranks: Sequence[int], method: str, args: list[list[Any]], kwargs: dict[str, list[Any]], lane: str
    ) -> Callable[[], list[Any]]:
        refs = self._send("call", ranks, method, args, kwargs, lane)
        call = OpenCall(self, method)
        return lambda: [
            BatchRef.from_stored(output) if isinstance(output, StoredRows) else output
            for output in self._wait(method, refs, call)
        ]

    def _plain_refs(self, ranks: Sequence[int], method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        rank_args, rank_kwargs = self._entries(args, kwargs)
        return list(self._send("call_plain", ranks, method, rank_args, rank_kwargs, self._lane(method)).values())

    def _send(
        self,
        entry: str,
        ranks: Sequence[int],
        method: str,
        args: list[list[Any]],
        kwargs: dict[str, list[Any]],
        lane: str,
    ) -> dict[int, Any]:
        if self._broken:
            raise self._broken[0]
        put: dict[int, _Put] = {}
        refs = {}
        for rank in ranks:
            own_args = [_wrap(arg[rank], put) for arg in args]
            own_kwargs = {key: _wrap(arg[rank], put) for key, arg in kwargs.items()}
            refs[rank] = _on(self._workers[rank], entry, lane).remote(self.role, method, own_args, own_kwargs, lane)
        return refs

    def _wait(self, method: str, refs: dict[int, Any], call: OpenCall | None = None) -> list[Any]:
        """Outputs by rank. The first failure ends the wait: the other ranks may be stuck in a collective with it."""
        call = call or OpenCall(self, method)
        try:
            return self._outputs(method, refs, call)
        finally:
            call.close()

    def _outputs(self, method: str, refs: dict[int, Any], call: OpenCall) -> list[Any]:
        outputs: dict[int, Any] = {}
        failures: dict[int, Exception | Failure] = {}
        deadline = None
        while len(outputs) + len(failures) < len(refs) and (deadline is None or time.monotonic() < deadline):
            pending = {ref: rank for rank, ref in refs.items() if rank not in outputs and rank not in failures}
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_POLL_S, fetch_local=False)
            if call.given_up is not None:
                raise call.given_up
            for ref, output in zip(ready, _outcomes(ready), strict=True):
                (failures if isinstance(output, Exception | Failure) else outputs)[pending[ref]] = output
            if failures and deadline is None:
                # Give a death the time to show itself: the peers' "connection closed" often comes first.
                deadline = time.monotonic() + _BLAME_GRACE_S
        if failures:
            self._raise(method, failures)
        return [outputs[rank] for rank in sorted(outputs)]

    def _raise(self, method: str, failures: dict[int, Exception | Failure]) -> None:
        died = next((rank for rank, failure in failures.items() if isinstance(failure, Exception)), None)
        if (lost := lost_ranks(self._nodes)) is not None:
            died, what, advice = lost.first, lost.what(self.role), ""
        elif died is not None:
            what, advice = _death(failures[died])
        if died is not None:
            detail = "\n".join(str(failure) for failure in failures.values())
            error = WorkerDiedError(what, self.role, died, self._hosts[died], method, detail)
            error.advice = advice
            self._broken.append(error)
            raise error
        rank, failure = min(failures.items())
        assert isinstance(failure, Failure)
        raise WorkerCallError(failure, self.role, rank, self._hosts[rank], method, len(failures) - 1)


def _checked_env(env: Mapping[str, str]) -> dict[str, str]:
    ours = sorted(env.keys() & RankInfo(0, 1, 0, 1, "", 0).environment().keys())
    if ours:
        raise ValueError(f"worker_env: the group itself sets {', '.join(ours)}, differently for every rank. Drop them.")
    return {name: str(value) for name, value in env.items()}


def _wrap(arg: Any, put: dict[int, _Put]) -> Any:
    """A large batch by its place in the object store, where it is put once, however many ranks get it."""
    data = arg.data if isinstance(arg, Shard) else arg
    if type(data) is not DataProto or data.nbytes < _INLINE_BYTES:
        return arg
    if id(data) not in put:
        put[id(data)] = _Put(ray.put(data))
    return replace(arg, data=put[id(data)]) if isinstance(arg, Shard) else put[id(data)]  # type: ignore[arg-type]


def _unwrap(arg: Any) -> Any:
    if isinstance(arg, Shard) and isinstance(arg.data, _Put):
        return replace(arg, data=ray.get(arg.data.ref))
    return ray.get(arg.ref) if isinstance(arg, _Put) else arg


def _outcomes(refs: list[Any]) -> list[Any]:
    """The outputs; in place of one that Ray could not deliver, its exception (the process died) or a Failure."""
    try:
        return ray.get(refs)
    except _DIED as error:
        undelivered: Any = error
    except ray.exceptions.RayError as error:
        undelivered = Failure(f"{type(error).__name__} before the method ran", str(error), None)
    return [undelivered] if len(refs) == 1 else [_outcomes([ref])[0] for ref in refs]


def _death(error: Exception | Failure) -> tuple[str, str]:
    """What a death looks like from outside, and the advice in it. Who vanishes was killed, mostly for its memory."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        used = _USED.search(str(error))
        how = f"Ray's memory monitor killed it, out of host memory ({used[1] if used else 'no size was given'})"
    elif "connection error" in str(error):
        free = f"{host_memory_available() / 2**30:.1f} GB of host memory are free here now that it is gone"
        how = f"killed (signal 9) or crashed, most likely out of host memory ({free})"
    else:
        return "worker process died", ""
    return f"worker process died: {how}. {_ADVICE}", _ADVICE


def _on(actor: Any, method: str, lane: str) -> Any:
    return getattr(actor, method).options(concurrency_group=lane)


def _named_actor(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ValueError(f"no running worker named {name!r}. Was its group started with detached=True?") from error


def _use_the_nodes_network() -> None:
    """Gloo asks the hostname for an address, which many systems resolve to the machine itself: not for other nodes."""
    if sum(node["Alive"] for node in ray.nodes()) > 1:
        name = interface_of(ray.util.get_node_ip_address())
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _share_cores(ranks_on_node: int) -> None:
    """Without a GPU the ranks of a node share its cores; left alone, Ray gives each process one thread."""
    threads = max(1, (os.cpu_count() or 1) // ranks_on_node)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
