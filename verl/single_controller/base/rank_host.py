"""RankHost: runs in every worker process; constructs the rank's roles and executes their calls."""

from __future__ import annotations

import inspect
import os
import socket
from operator import attrgetter
from typing import Any

import numpy as np

from verl.protocol import DataProto, mask_filler_rows
from verl.single_controller.base.decorator import BatchShard, MethodSpec
from verl.single_controller.base.errors import Failure
from verl.single_controller.base.heartbeat import ComputeTracker, Heartbeat
from verl.single_controller.base.worker import RankInfo, Worker, worker_rank
from verl.single_controller.base.worker_group import ClassWithInitArgs, specs_of
from verl.utils.concurrency import SharedEventLoop


class RankHost:
    """The workers of one rank, one per role. A subclass for a transport overrides `receive` and `send`."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._specs: dict[str, dict[str, MethodSpec]] = {}
        self._info: RankInfo | None = None
        self._loop = SharedEventLoop("verl-async-methods")  # one for all roles, so that they can share locks
        self._tracker = ComputeTracker()

    def heartbeat(self, all_threads: bool = False) -> Heartbeat:
        """What the compute lane does now. Thread-safe."""
        return self._tracker.heartbeat(all_threads)

    def construct(self, info: RankInfo, cls_with_init: ClassWithInitArgs) -> Failure | None:
        """Construct the workers of all roles, as rank `info`."""
        self._info = info
        self._specs = specs_of(cls_with_init)
        try:
            with worker_rank(info), self._tracker.running("__init__", lambda: 0):
                for role, cls in cls_with_init.roles().items():
                    worker = self._workers[role] = cls()
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
        worker = self._workers.get(role)
        with self._tracker.running(method, lambda: worker._progress.done if isinstance(worker, Worker) else 0):
            return self._run(role, method, args, kwargs, lane)

    def _run(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        try:
            worker = self._workers[role]
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
