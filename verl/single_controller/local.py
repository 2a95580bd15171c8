"""LocalWorkerGroup: one rank in the controller's process, for breakpoints and profilers. Needs no Ray."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.base.errors import Failure, WorkerCallError, result_or_raise
from verl.single_controller.base.worker import RankHost, RankInfo
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    RankHandle,
    ResourcePool,
    WorkerGroup,
    check_prefixes,
    specs_of,
)
from verl.single_controller.ray.column_store import StoredRows, attach_bundle, bundle_rows


class LocalRankHost(RankHost):
    """Isolates arguments as another process would: a worker that writes to them does not change the caller's batch."""

    def receive(self, data: DataProto) -> DataProto:
        received = data.select()
        received._borrowed = True  # copy on write
        received.non_tensor_batch = {key: array.copy() for key, array in data.non_tensor_batch.items()}
        return received


@dataclass(frozen=True)
class LocalRankHandle(RankHandle):
    """Handle of the rank in this process; calls run in the caller's thread."""

    host: LocalRankHost
    role: str
    rank: int = 0

    def notify(self, method: str, *args: Any) -> None:
        self.call(method, *args)

    def call(self, method: str, *args: Any) -> Any:
        return result_or_raise(self.host.call(self.role, method, list(args), {}, "control"))

    def call_rows(self, method: str, *args: Any) -> tuple[Any, StoredRows | None]:
        value, rows = self.call(method, *args)
        return value, None if rows is None else attach_bundle(*bundle_rows(rows))


class LocalWorkerGroup(WorkerGroup):
    """The interface of `RayWorkerGroup` for a single rank. Calls run in the caller's thread."""

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        *,
        device_name: str = "cpu",
        collective_timeout: float = 1800.0,
        expendable: bool = False,
    ) -> None:
        """`expendable` is ignored: it is meant for groups on Ray."""
        if ray_cls_with_init is None:
            raise ValueError("LocalWorkerGroup: ray_cls_with_init is missing. Pass the worker class to start.")
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ValueError(
                f"LocalWorkerGroup: the pool has {resource_pool.world_size} ranks; a local group has 1."
                " Use RayWorkerGroup for several."
            )
        self._host = LocalRankHost()
        # One compute call at a time, as on the compute lane of a worker process.
        self._compute = threading.RLock()
        all_specs = specs_of(ray_cls_with_init)
        role, specs = next(iter(all_specs.items())) if len(all_specs) == 1 else ("colocated", {})
        super().__init__(role, specs, world_size=1)
        self._all_specs = all_specs
        info = RankInfo(0, 1, 0, 1, "127.0.0.1", 0, device_name, collective_timeout)
        self._raise_if_failed(self._host.construct(info, ray_cls_with_init), "__init__")

    @classmethod
    def reserve(cls, pools: Sequence[ResourcePool]) -> None:
        """Nothing to reserve in this process."""

    @classmethod
    def cpu_pool(cls, process_on_nodes: Sequence[int], name: str) -> None:
        """Not supported: there is only one process."""

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, LocalWorkerGroup]:
        return {prefix: self._view(prefix) for prefix in check_prefixes(prefix_set, self._all_specs)}

    def query_ranks(self, method: str, timeout: float) -> list[Any]:
        return [self._raise_if_failed(self._host.call(self.role, method, [], {}, "control"), method)]

    def handle(self, rank: int) -> RankHandle:
        return LocalRankHandle(self._host, self.role)

    def shutdown(self) -> None:
        self._host = LocalRankHost()

    def _view(self, role: str) -> LocalWorkerGroup:
        view = object.__new__(type(self))
        view._host, view._compute, view._all_specs = self._host, self._compute, self._all_specs
        WorkerGroup.__init__(view, role, self._all_specs[role], world_size=1)
        return view

    def _submit(
        self, ranks: Sequence[int], method: str, args: list[list[Any]], kwargs: dict[str, list[Any]], lane: str
    ) -> Callable[[], list[Any]]:
        own_args, own_kwargs = [arg[0] for arg in args], {key: arg[0] for key, arg in kwargs.items()}
        with self._compute if lane == "compute" else nullcontext():
            output = self._host.call(self.role, method, own_args, own_kwargs, lane)
        return lambda: [self._raise_if_failed(output, method)]

    def _raise_if_failed(self, output: Any, method: str) -> Any:
        if isinstance(output, Failure):
            raise WorkerCallError(output, self.role, 0, f"{socket.gethostname()} pid {os.getpid()}", method)
        return output
