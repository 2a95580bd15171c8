"""RankHost: what runs in every worker process. Builds the rank's roles and runs their calls."""

from __future__ import annotations

import inspect
import os
import socket
from operator import attrgetter
from typing import Any

import numpy as np

from verl.protocol import DataProto, mask_filler_rows
from verl.single_controller.base.beat import Beat, Heart
from verl.single_controller.base.decorator import MethodSpec
from verl.single_controller.base.dispatch import Shard
from verl.single_controller.base.errors import Failure
from verl.single_controller.base.worker import RankInfo, Worker, worker_rank
from verl.single_controller.base.worker_group import ClassWithInitArgs, specs_of
from verl.utils.concurrency import SharedEventLoop


class RankHost:
    """One rank's process. A transport says how arguments arrive and results leave (`receive`, `send`)."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._specs: dict[str, dict[str, MethodSpec]] = {}
        self._info: RankInfo | None = None
        self._loop = SharedEventLoop("verl-async-methods")  # of all roles, so that they can share locks
        self._heart = Heart()

    def beat(self, every_thread: bool = False) -> Beat:
        """What the compute lane does; answers beside it."""
        return self._heart.beat(every_thread)

    def construct(self, info: RankInfo, cls_with_init: ClassWithInitArgs) -> Failure | None:
        """Construct every role as rank `info`."""
        self._info = info
        self._specs = specs_of(cls_with_init)
        try:
            with worker_rank(info), self._heart.running("__init__", lambda: 0):
                for role, cls in cls_with_init.roles().items():
                    worker = self._workers[role] = cls()
                    if isinstance(worker, Worker):
                        worker.colocated, worker.run_config = tuple(cls_with_init.roles()), cls.run_config
        except Exception as error:  # noqa: BLE001 - carried to the controller, which raises it
            return Failure.of(error)
        return None

    def call(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        """Run one method of one role; an exception comes back as a `Failure`."""
        if lane != "compute":
            return self._run(role, method, args, kwargs, lane)
        worker = self._workers.get(role)
        with self._heart.running(method, lambda: worker._progress.done if isinstance(worker, Worker) else 0):
            return self._run(role, method, args, kwargs, lane)

    def _run(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        try:
            worker = self._workers[role]
            bound = attrgetter(method)(worker)
            shard = next((arg for arg in [*args, *kwargs.values()] if isinstance(arg, Shard)), None)
            args = [self._arrive(arg) for arg in args]
            kwargs = {key: self._arrive(arg) for key, arg in kwargs.items()}
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
            rows = len(shard.data)
            if isinstance(output, DataProto):
                output = _without_fillers(output, rows, shard.fillers)
            return self.send(output, shard)
        except Exception as error:  # noqa: BLE001 - carried to the controller, which raises it
            return Failure.of(error)

    def describe(self) -> tuple[RankInfo | None, dict[str, dict[str, MethodSpec]], str, int]:
        """Rank, roles with their methods, host name, process id."""
        return self._info, self._specs, socket.gethostname(), os.getpid()

    def receive(self, data: DataProto) -> DataProto:
        """A batch argument as the worker's method gets it."""
        return data

    def send(self, output: Any, shard: Shard | None) -> Any:
        """A method's output as it leaves for the controller."""
        return output

    def _arrive(self, arg: Any) -> Any:
        if isinstance(arg, Shard):
            return mask_filler_rows(self.receive(arg.data), arg.fillers)
        return self.receive(arg) if isinstance(arg, DataProto) else arg


def _counted_share(shard: Shard | None) -> float:
    """The part of a call's rows that is counted: no fillers, and each row on one rank only."""
    if shard is None:
        return 1.0
    rows = len(shard.data)
    return (rows - shard.fillers) / rows if shard.collect and rows else 0.0


def _without_fillers(output: DataProto, rows: int, fillers: int) -> DataProto:
    """Drop what a method made of filler rows: the last `fillers` of `rows`, or as many times more as it returned.

    Trajectories of several rows may be of any number: those of one stand together.
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
            f"the method got {rows} rows, {fillers} of them fillers, and returned {len(output)}: not a multiple, so the"
            " fillers cannot be told apart. Give it a batch that divides over the ranks."
        )
    return output[: len(output) - fillers * (len(output) // rows)]
