"""Worker: one rank of a role, in a process of its own or shared with the same rank of other roles."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.dispatch import MeshPlace
from verl.single_controller.base.errors import CallCancelled
from verl.utils.device import memory_in_use
from verl.utils.progress import Progress, record_progress


@dataclass(frozen=True)
class RankInfo:
    """Where a worker stands in its group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    device_name: str = "cpu"
    collective_timeout: float = 1800.0

    def environment(self) -> dict[str, str]:
        """The variables that torch, transformers and Megatron read."""
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
        """As torchrun sets it; a single rank when nothing is set."""
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


def collective_timeout(hang_timeout: float | None) -> float:
    """Seconds after which torch itself gives up a collective: the last resort, later than the run's own limit."""
    return max(1800.0, 2 * (hang_timeout or 0.0))


_rank_info: contextvars.ContextVar[RankInfo | None] = contextvars.ContextVar("verl_rank_info", default=None)


@contextmanager
def worker_rank(info: RankInfo) -> Iterator[None]:
    """Workers constructed inside know that they are this rank."""
    token = _rank_info.set(info)
    try:
        yield
    finally:
        _rank_info.reset(token)


class Worker:
    """Base of all roles. Subclass it, decorate methods with `@register`, and start it as a worker group.

    Calls run on two lanes: `compute` (one at a time, in submission order; the only one that may run collectives) and
    `control` (concurrent, answers while compute is busy).
    """

    colocated: tuple[str, ...] = ()
    """The names of all roles of its process, its own included."""
    run_config: Any = None
    """The configuration of the whole run, for advice on keys of others; a role works by what it was constructed with.
    None: it was started without one."""
    _rank_info: RankInfo
    _meshes: dict[str, MeshPlace]
    _cancel_requested: threading.Event
    _computing: str | None
    _progress: Progress

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        # In __new__ so that a subclass may use self.rank before, or without, calling super().__init__().
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
        """This rank's device. A process that sees one GPU (as Ray arranges) uses that one."""
        if self.device_name == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_name, self.local_rank % max(1, torch.cuda.device_count()))

    def get_master_addr_port(self) -> tuple[str, int]:
        """Address and port at which rank 0 listens for the process group."""
        return self._rank_info.master_addr, self._rank_info.master_port

    def init_process_group(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Join the ranks of this process's group (once per process; colocated roles share it).

        The default backend is gloo, with nccl beside it for CUDA tensors; the default time-out is the group's.
        """
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
                raise RuntimeError(
                    f"this process is already rank {dist.get_rank()} of {dist.get_world_size()} in a process group; it "
                    f"cannot be rank {self.rank} of {self.world_size} too. Roles of one process have one world size."
                )
            return
        if self.device_name == "cuda":
            torch.cuda.set_device(self.device)
        addr, port = self.get_master_addr_port()
        where: dict[str, Any] = (
            {"init_method": f"tcp://{addr}:{port}"} if self.world_size > 1 else {"store": dist.HashStore()}
        )
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if self.device_name == "cuda" else "gloo"),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s or self._rank_info.collective_timeout),
            **where,
        )

    def register_mesh(self, name: str, mesh: dist.DeviceMesh, dp_dim: str = "dp") -> None:
        """Dispatch over `name` gives data shards by position along `dp_dim`; the first rank of each shard answers.

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
        """As `register_mesh`, for engines that keep their own groups (Megatron, an inference engine)."""
        self._meshes[name] = MeshPlace(dp_rank, collect)

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool = True) -> None:
        """The name of `register_mesh_place` in workers written for other releases."""
        self.register_mesh_place(mesh_name, int(dp_rank), bool(is_collect))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mesh_place(self, name: str) -> MeshPlace:
        """This rank's place in a registered mesh."""
        if name not in self._meshes:
            raise ValueError(
                f"{type(self).__name__}: no mesh {name!r} is registered (known: {sorted(self._meshes)})."
                " Call register_mesh before the first method dispatched over it."
            )
        return self._meshes[name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def cancel(self) -> bool:
        """Ask the running compute call to stop at its next `check_cancelled()`; says whether one was running."""
        if self._computing is None:
            return False
        self._cancel_requested.set()
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def running(self) -> str | None:
        """The compute method running now, or None."""
        return self._computing

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def progress(self) -> tuple[int, int]:
        """(done, total) of the units, mostly samples, in the running compute call; (0, 0) where nothing is counted."""
        return self._progress.read()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def memory_gb(self) -> tuple[float, float]:
        """(most device memory since the last call, what is held now) of this process in GB; zeros without a GPU."""
        peak, now = memory_in_use(self.device, reset=True)
        return peak / 2**30, now / 2**30

    def check_cancelled(self) -> None:
        """Long compute methods call this between pieces of work; raises `CallCancelled` once cancelled."""
        if self._cancel_requested.is_set():
            raise CallCancelled(f"{self._computing} was cancelled")

    @contextmanager
    def _compute_call(self, method: str, share: float = 1.0) -> Iterator[None]:
        """Around every compute call; `share` is the part of this rank's rows that the group counts."""
        self._cancel_requested.clear()
        self._computing = method
        # A counter per call: what an earlier one left running does not count here.
        self._progress = Progress(share)
        try:
            with record_progress(self._progress):
                yield
        finally:
            self._computing, self._progress = None, Progress()
