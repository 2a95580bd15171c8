"""Worker groups without Ray.

LocalWorkerGroup: one rank in the controller's process, for breakpoints and profilers. TorchrunWorkerGroup: processes
that torchrun started; rank 0 is the controller, others serve it.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NoReturn

import torch.distributed as dist

from verl.protocol import DataProto
from verl.single_controller.base.worker import RankHost, RankInfo, Worker, worker_rank
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    Failure,
    RankHandle,
    ResourcePool,
    WorkerCallError,
    WorkerDiedError,
    WorkerGroup,
    check_prefixes,
    result_or_raise,
    specs_of,
)
from verl.single_controller.ray.column_store import StoredRows, attach_bundle, bundle_rows

logger = logging.getLogger(__name__)

_WAIT_AFTER_FAILURE_S = 30.0


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

    @property
    def worker(self) -> Any:
        """The worker of this group's role; it is in this process."""
        return self._host.workers[self.role]

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
            raise WorkerCallError(output, self.role, 0, _this_host(), method)
        return output


class TorchrunWorkerGroup(WorkerGroup):
    """The worker group, in the process of rank 0.

    Rank 0 runs its calls in the caller's thread; the other ranks run theirs in their own processes (`serve_rank`).
    """

    def __init__(
        self, cls_with_init: ClassWithInitArgs, *, device_name: str = "cpu", collective_timeout: float = 1800.0
    ) -> None:
        info = _init_process_group(device_name, collective_timeout)
        # One compute call at a time, and in the same order on all ranks.
        self._compute = threading.RLock()
        (role,) = cls_with_init.roles()
        super().__init__(role, specs_of(cls_with_init)[role], info.world_size)
        self._host, key = RankHost(), secrets.token_bytes(32)
        with Listener(("", 0), authkey=key) as listener:
            dist.broadcast_object_list([(cls_with_init, info.master_addr, listener.address[1], key)])
            peers = [_Peer(listener.accept()) for _ in range(1, self.world_size)]
        self._peers = {peer.rank: peer for peer in peers}
        result_or_raise(self._host.construct(info, cls_with_init))

    @classmethod
    def reserve(cls, pools: Sequence[ResourcePool]) -> None:
        """Nothing to reserve: torchrun has started the processes."""

    @classmethod
    def cpu_pool(cls, process_on_nodes: Sequence[int], name: str) -> None:
        """Not supported: there are no other processes."""

    def spawn(self, prefix_set: Iterable[str]) -> NoReturn:
        raise NotImplementedError("a torchrun group has one role")

    def handle(self, rank: int) -> RankHandle:
        raise NotImplementedError("ranks of a torchrun group can only be called by rank 0")

    def query_ranks(self, method: str, timeout: float) -> list[Any]:
        calls = [peer.call(method, [], {}, "control") for _, peer in sorted(self._peers.items())]
        replies = [result_or_raise(self._host.call(self.role, method, [], {}, "control"))]
        for call in calls:
            try:
                replies.append(result_or_raise(call.result(timeout)))
            except (TimeoutError, EOFError):
                replies.append(None)
        return replies

    def shutdown(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _submit(
        self, ranks: Sequence[int], method: str, args: list[list[Any]], kwargs: dict[str, list[Any]], lane: str
    ) -> Callable[[], list[Any]]:
        def rank_arguments(rank: int) -> tuple[list[Any], dict[str, Any]]:
            index = list(ranks).index(rank)
            return [arg[index] for arg in args], {key: arg[index] for key, arg in kwargs.items()}

        outputs: dict[int, Any] = {}
        with self._compute if lane == "compute" else nullcontext():
            for rank in ranks:
                if rank > 0:
                    outputs[rank] = self._peers[rank].call(method, *rank_arguments(rank), lane)
            if 0 in ranks:  # last, so that the other ranks compute at the same time
                own_args, own_kwargs = rank_arguments(0)
                outputs[0] = self._host.call(self.role, method, own_args, own_kwargs, lane)
        return lambda: [self._result(outputs[rank], rank, method) for rank in ranks]

    def _result(self, output: Any, rank: int, method: str) -> Any:
        host = _this_host() if rank == 0 else self._peers[rank].host
        try:
            result = output.result() if isinstance(output, Future) else output
        except EOFError as error:
            raise WorkerDiedError("the process of the rank died", self.role, rank, host, method) from error
        if isinstance(result, Failure):
            raise WorkerCallError(result, self.role, rank, host, method)
        return result


def serve_rank(*, device_name: str = "cpu", collective_timeout: float = 1800.0) -> None:
    """Main function of every rank except 0: construct the worker that rank 0 broadcasts, and run its calls.

    Returns when rank 0 closes the group. SIGTERM and SIGINT are ignored: rank 0 handles them.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    info = _init_process_group(device_name, collective_timeout)
    message: list[Any] = [None]
    dist.broadcast_object_list(message)
    cls_with_init, address, port, key = message[0]
    with Client((address, port), authkey=key) as connection:
        _RankServer(connection, info, cls_with_init).run()
    dist.destroy_process_group()


class _RankServer:
    """Runs the calls of rank 0: compute calls in order in the thread of `run`, control calls in other threads."""

    def __init__(self, connection: Connection, info: RankInfo, cls_with_init: ClassWithInitArgs) -> None:
        self._connection, self._send_lock = connection, threading.Lock()
        self._host, (self._role,) = RankHost(), cls_with_init.roles()
        self._compute_calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        connection.send_bytes(pickle.dumps((info.rank, _this_host())))
        result_or_raise(self._host.construct(info, cls_with_init))

    def run(self) -> None:
        """Run calls until rank 0 closes the group.

        After a failed call, rank 0 may be stuck in a collective with this rank: if no further call arrives, raise, so
        that torchrun ends all ranks.
        """
        threading.Thread(target=self._read, daemon=True).start()
        timeout = None
        while True:
            try:
                call = self._compute_calls.get(timeout=timeout)
            except queue.Empty:
                raise RuntimeError("rank 0 does not continue after the error above") from None
            if call is None:
                return
            failure = self._run_call(*call)
            if failure:
                logger.error("a call failed: %s", failure.traceback)
            timeout = _WAIT_AFTER_FAILURE_S if failure else None

    def _run_call(self, number: int, *call: Any) -> Failure | None:
        output = self._host.call(self._role, *call)
        with self._send_lock:
            self._connection.send_bytes(pickle.dumps((number, output)))
        return output if isinstance(output, Failure) else None

    def _read(self) -> None:
        try:
            while (call := pickle.loads(self._connection.recv_bytes())) is not None:
                if call[-1] == "compute":
                    self._compute_calls.put(call)
                else:
                    threading.Thread(target=self._run_call, args=call, daemon=True).start()
            self._compute_calls.put(None)
        except (EOFError, OSError):
            logger.error("lost the connection to rank 0")
            os._exit(1)  # this rank may be blocked in a collective with rank 0


class _Peer:
    """Connection of rank 0 to another rank. Replies arrive in any order, with the number of their call."""

    def __init__(self, connection: Connection) -> None:
        self.rank, self.host = pickle.loads(connection.recv_bytes())
        self._connection, self._send_lock = connection, threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._calls, self._closed = 0, False
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Future[Any]:
        """Future of the result; EOFError if the process died."""
        future: Future[Any] = Future()
        with self._send_lock:
            if self._closed:
                future.set_exception(EOFError())
                return future
            self._calls += 1
            message = pickle.dumps((self._calls, method, args, kwargs, lane))
            self._pending[self._calls] = future
            try:
                self._connection.send_bytes(message)
            except OSError as error:  # the process died, and the reading thread has not received the EOF yet
                self._pending.pop(self._calls).set_exception(EOFError(str(error)))
        return future

    def close(self) -> None:
        """End the other rank's `serve_rank`."""
        with self._send_lock, suppress(OSError):  # the process has died already
            if not self._closed:
                self._connection.send_bytes(pickle.dumps(None))

    def _read(self) -> None:
        try:
            while True:
                number, output = pickle.loads(self._connection.recv_bytes())
                self._pending.pop(number).set_result(output)
        except (EOFError, OSError):
            with self._send_lock:
                self._closed = True
                for future in self._pending.values():
                    future.set_exception(EOFError())


def _this_host() -> str:
    """Host name and process id, for error messages."""
    return f"{socket.gethostname()} pid {os.getpid()}"


def _init_process_group(device_name: str, collective_timeout: float) -> RankInfo:
    """Initialize torch.distributed with the rank that torchrun assigned to this process."""
    info = replace(RankInfo.from_environment(), device_name=device_name, collective_timeout=collective_timeout)
    with worker_rank(info):
        Worker().init_process_group()
    return info
