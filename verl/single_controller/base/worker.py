"""Worker: base class of the roles; RankHost: executes calls on the workers of a rank, one per role, in its process."""

from __future__ import annotations

import contextvars
import inspect
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.config.devices import DeviceUsage, device_usage
from verl.protocol import DataProto, mask_filler_rows
from verl.single_controller.base.decorator import BatchShard, Dispatch, MeshPlace, MethodSpec, register
from verl.single_controller.base.heartbeat import ComputeTracker, Heartbeat
from verl.single_controller.base.worker_group import CallCancelled, ClassWithInitArgs, Failure, specs_of
from verl.utils.compile_cache import open_compile_cache
from verl.utils.concurrency import SharedEventLoop
from verl.utils.device import capture_gate, memory_in_use
from verl.utils.progress import Progress, Span, record_progress, span, take_spans


@dataclass(frozen=True)
class RankInfo:
    """Rank, world size and rendezvous address of a worker."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    device_name: str = "cpu"
    collective_timeout: float = 1800.0

    def environment(self) -> dict[str, str]:
        """Environment variables that torch, transformers and Megatron read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "RAY_LOCAL_RANK": str(self.local_rank),
            "RAY_LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @classmethod
    def from_environment(cls) -> RankInfo:
        """Read the variables that torchrun sets; a single rank if they are not set."""
        get = os.environ.get
        return cls(
            rank=int(get("RANK", "0")),
            world_size=int(get("WORLD_SIZE", "1")),
            local_rank=int(get("LOCAL_RANK", "0")),
            local_world_size=int(get("LOCAL_WORLD_SIZE", get("WORLD_SIZE", "1"))),
            master_addr=get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(get("MASTER_PORT", "29500")),
            device_name="cuda" if torch.cuda.is_available() else "cpu",
        )


@dataclass(frozen=True)
class RankUsage:
    """Activity of a process since the last report and its current resource use, for the recording of the run."""

    host: str
    pid: int
    spans: list[Span]
    """Compute calls, and periods in which its engine generated. Each span is reported once: the first role of a process
    that reports returns those of all its colocated roles."""
    device: DeviceUsage | None
    """None without a GPU, or if NVML is not available."""
    tensor_bytes: int
    """Device memory that torch has allocated in this process."""
    load: Any = None
    """`Load` of the rank's inference engine; None if it has none."""


def collective_timeout(hang_timeout: float | None) -> float:
    """Timeout of torch collectives in seconds: at least twice `hang_timeout`, so that hang detection acts first."""
    return max(1800.0, 2 * (hang_timeout or 0.0))


_rank_info: contextvars.ContextVar[RankInfo | None] = contextvars.ContextVar("verl_rank_info", default=None)


@contextmanager
def worker_rank(info: RankInfo) -> Iterator[None]:
    """Workers constructed in this context get this rank."""
    token = _rank_info.set(info)
    try:
        yield
    finally:
        _rank_info.reset(token)


class Worker:
    """Base of all roles. Subclass it, decorate methods with `@register`, and start it as a worker group.

    Calls run on two lanes: `compute` (one at a time, in submission order; the only one that may run collectives) and
    `control` (concurrent with compute calls).
    """

    colocated: tuple[str, ...] = ()
    """Names of all roles in this process, including this one."""
    run_config: Any = None
    """Configuration of the whole run, used only for advice in error messages; None if the group was started without."""
    _rank_info: RankInfo
    _meshes: dict[str, MeshPlace]
    _cancel_requested: threading.Event
    _computing: str | None
    _progress: Progress

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        # In __new__, because a subclass may use self.rank before or without calling super().__init__().
        self = super().__new__(cls)
        self._rank_info = _rank_info.get() or RankInfo.from_environment()
        self._meshes = {}
        self._cancel_requested = threading.Event()
        self._computing = None
        self._progress = Progress()
        return self

    @property
    def rank(self) -> int:
        return self._rank_info.rank

    @property
    def world_size(self) -> int:
        return self._rank_info.world_size

    @property
    def local_rank(self) -> int:
        return self._rank_info.local_rank

    @property
    def local_world_size(self) -> int:
        return self._rank_info.local_world_size

    @property
    def device_name(self) -> str:
        return self._rank_info.device_name

    @property
    def device(self) -> torch.device:
        """Device of this rank. A process that sees only one GPU, as under Ray, uses it, whatever its local rank."""
        if self.device_name == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_name, self.local_rank % max(1, torch.cuda.device_count()))

    def get_master_addr_port(self) -> tuple[str, int]:
        """Address and port of the rendezvous on rank 0."""
        return self._rank_info.master_addr, self._rank_info.master_port

    def init_process_group(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Initialize torch.distributed over the ranks of the group (once per process; colocated roles share it).

        Default backend: gloo, plus nccl for CUDA tensors. Default timeout: `collective_timeout` of the group.
        """
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
                raise RuntimeError(
                    f"this process already is rank {dist.get_rank()} of {dist.get_world_size()} in a process group; it"
                    f" cannot also be rank {self.rank} of {self.world_size}. Colocated roles need equal world sizes."
                )
            return
        if self.device_name == "cuda":
            torch.cuda.set_device(self.device)
        addr, port = self.get_master_addr_port()
        rendezvous: dict[str, Any] = (
            {"init_method": f"tcp://{addr}:{port}"} if self.world_size > 1 else {"store": dist.HashStore()}
        )
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if self.device_name == "cuda" else "gloo"),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s or self._rank_info.collective_timeout),
            **rendezvous,
        )

    def register_mesh(self, name: str, mesh: dist.DeviceMesh, dp_dim: str = "dp") -> None:
        """Register `mesh` for dispatch: data is split along `dp_dim`; the first rank of each shard returns the result.

        `dp_dim` may name several dimensions of the mesh, joined by "+".
        """
        dims = dp_dim.split("+")
        unknown = set(dims) - set(mesh.mesh_dim_names or ())
        if unknown:
            raise ValueError(f"register_mesh({name!r}): no dimension {sorted(unknown)} in mesh {mesh.mesh_dim_names}.")
        dp_rank, collect = 0, True
        for dim in mesh.mesh_dim_names:
            position, size = mesh.get_local_rank(dim), mesh.size(mesh.mesh_dim_names.index(dim))
            if dim in dims:
                dp_rank = dp_rank * size + position
            else:
                collect = collect and position == 0
        self.register_mesh_place(name, dp_rank, collect)

    def register_mesh_place(self, name: str, dp_rank: int, collect: bool) -> None:
        """As `register_mesh`, for engines with their own process groups (Megatron, inference engines)."""
        self._meshes[name] = MeshPlace(dp_rank, collect)

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool = True) -> None:
        """Alias of `register_mesh_place` for workers written for other releases."""
        self.register_mesh_place(mesh_name, int(dp_rank), bool(is_collect))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mesh_place(self, name: str) -> MeshPlace:
        """Position of this rank in a registered mesh."""
        if name not in self._meshes:
            raise ValueError(
                f"{type(self).__name__}: no mesh {name!r} is registered (known: {sorted(self._meshes)})."
                " Call register_mesh before the first method dispatched over it."
            )
        return self._meshes[name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def cancel(self) -> bool:
        """Make the running compute call stop at its next `check_cancelled()`. Returns whether one is running."""
        if self._computing is None:
            return False
        self._cancel_requested.set()
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def running(self) -> str | None:
        """Name of the running compute method, or None."""
        return self._computing

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def progress(self) -> tuple[int, int]:
        """(done, total) units, usually samples, of the running compute call; (0, 0) if it counts none."""
        return self._progress.read()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def memory_gb(self) -> tuple[float, float]:
        """(peak since the last call, current) device memory of this process in GB; zeros without a GPU."""
        peak, current = memory_in_use(self.device, reset=True)
        return peak / 2**30, current / 2**30

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def rank_usage(self) -> RankUsage:
        """Compute calls since the last report, and current use of the device and of the engine."""
        device, tensor_bytes = None, 0
        # A query must not create a CUDA context: loop workers have none.
        if self.device.type == "cuda" and torch.cuda.is_initialized():
            device = device_usage(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
            tensor_bytes = memory_in_use(self.device)[1]
        return RankUsage(socket.gethostname(), os.getpid(), take_spans(), device, tensor_bytes, self._engine_load())

    def _engine_load(self) -> Any:
        """The load of the inference engine that this rank leads; None if there is none."""
        return None

    def check_cancelled(self) -> None:
        """Raise `CallCancelled` if the call was cancelled. Long compute methods call this regularly."""
        if self._cancel_requested.is_set():
            raise CallCancelled(f"{self._computing} was cancelled")

    @contextmanager
    def _compute_call(self, method: str, share: float = 1.0) -> Iterator[None]:
        """Context of every compute call. `share`: share of this rank's rows that count as progress."""
        self._cancel_requested.clear()
        self._computing = method
        # A new counter per call: threads left over from an earlier call must not count here.
        self._progress = Progress(share)
        try:
            with record_progress(self._progress), span(method):
                yield
        finally:
            self._computing, self._progress = None, Progress()


# ---------------------------------------------------------------- the process of a rank


class RankHost:
    """The workers of one rank, one per role. A subclass for a transport overrides `receive` and `send`."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self._specs: dict[str, dict[str, MethodSpec]] = {}
        self._info: RankInfo | None = None
        self._loop = SharedEventLoop("verl-async-methods")  # one for all roles, so that they can share locks
        self._tracker = ComputeTracker()

    def heartbeat(self, all_threads: bool = False) -> Heartbeat:
        """Describe the compute call or background work that runs now. Thread-safe."""
        return self._tracker.heartbeat(all_threads)

    def construct(self, info: RankInfo, cls_with_init: ClassWithInitArgs) -> Failure | None:
        """Construct the workers of all roles, as rank `info`."""
        self._info = info
        self._specs = specs_of(cls_with_init)
        if info.device_name == "cuda":  # nothing is compiled on a CPU
            open_compile_cache()
        try:
            with worker_rank(info), self._tracker.running("__init__", lambda: 0):
                for role, cls in cls_with_init.roles().items():
                    worker = self.workers[role] = cls()
                    if isinstance(worker, Worker):
                        worker.colocated, worker.run_config = tuple(cls_with_init.roles()), cls.run_config
        except Exception as error:  # noqa: BLE001 - returned to the controller, which raises it
            return Failure.from_exception(error)
        return None

    def call(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        """Run a method of a role and return its result; an exception is returned as a `Failure`.

        `method` may be a path: "host.submit" is the method `submit` of the worker's attribute `host`.
        """
        if lane != "compute":
            return self._run(role, method, args, kwargs, lane)
        worker = self.workers.get(role)
        progress = self._tracker.running(method, lambda: worker._progress.done if isinstance(worker, Worker) else 0)
        with progress, capture_gate.work():
            return self._run(role, method, args, kwargs, lane)

    def _run(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        try:
            worker = self.workers[role]
            bound = attrgetter(method)(worker)
            shard = next((arg for arg in [*args, *kwargs.values()] if isinstance(arg, BatchShard)), None)
            args = [self._received(arg) for arg in args]
            kwargs = {key: self._received(arg) for key, arg in kwargs.items()}
            if lane == "compute" and isinstance(worker, Worker):
                with worker._compute_call(method, _counted_share(shard)):
                    output = bound(*args, **kwargs)
            else:
                output = bound(*args, **kwargs)
            if inspect.iscoroutine(output):
                output = self._loop.run(output)
            if shard is None:
                return self.send(output, None)
            if not shard.collect:
                return None
            if isinstance(output, DataProto):
                output = _drop_fillers(output, len(shard.data), shard.fillers)
            return self.send(output, shard)
        except Exception as error:  # noqa: BLE001 - returned to the controller, which raises it
            return Failure.from_exception(error)

    def describe(self) -> tuple[RankInfo | None, dict[str, dict[str, MethodSpec]], str, int]:
        """Rank, method specs of every role, host name, process id."""
        return self._info, self._specs, socket.gethostname(), os.getpid()

    def receive(self, data: DataProto) -> DataProto:
        """Convert a batch argument from the transport to what the worker's method receives."""
        return data

    def send(self, output: Any, shard: BatchShard | None) -> Any:
        """Convert a method's output to what the transport returns to the controller."""
        return output

    def _received(self, arg: Any) -> Any:
        if isinstance(arg, BatchShard):
            return mask_filler_rows(self.receive(arg.data), arg.fillers)
        return self.receive(arg) if isinstance(arg, DataProto) else arg


def _counted_share(shard: BatchShard | None) -> float:
    """Share of a call's rows that count as progress: fillers do not, and each row counts on one rank only."""
    if shard is None:
        return 1.0
    rows = len(shard.data)
    return (rows - shard.fillers) / rows if shard.collect and rows else 0.0


def _drop_fillers(output: DataProto, rows: int, fillers: int) -> DataProto:
    """Drop the results of the last `fillers` of the `rows` input rows.

    A method may return several rows per input row: the same number for each, or adjacent rows of one trajectory.
    """
    if fillers == 0 or len(output) == 0:
        return output
    names = output.non_tensor_batch.get("trajectory")
    if names is not None:
        starts = np.flatnonzero([True, *(names[1:] != names[:-1])])
        if len(starts) == rows:
            return output[: starts[rows - fillers]]
    if len(output) % rows:
        raise ValueError(
            f"the method received {rows} rows, {fillers} of them fillers, and returned {len(output)} rows: not a"
            " multiple, so the results of fillers cannot be identified. Pass a batch that divides over the ranks."
        )
    return output[: len(output) - fillers * (len(output) // rows)]
