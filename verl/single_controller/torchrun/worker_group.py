"""TorchrunWorkerGroup: the ranks are the processes that torchrun started; the first drives, the others serve it."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NoReturn

import torch.distributed as dist

from verl.single_controller.base.errors import Failure, WorkerCallError, WorkerDiedError
from verl.single_controller.base.handle import RankHandle, result_of
from verl.single_controller.base.host import RankHost
from verl.single_controller.base.worker import RankInfo, Worker, worker_rank
from verl.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup, specs_of

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0


class TorchrunWorkerGroup(WorkerGroup):
    """Of rank 0. Its own part of a call runs in the caller's thread, the other ranks' in their processes."""

    def __init__(
        self, cls_with_init: ClassWithInitArgs, *, device_name: str = "cpu", collective_timeout: float = 1800.0
    ) -> None:
        info = _joined(device_name, collective_timeout)
        # One compute call at a time, and in the same order on all ranks.
        self._compute = threading.RLock()
        (role,) = cls_with_init.roles()
        super().__init__(role, specs_of(cls_with_init)[role], info.world_size)
        self._host, key = RankHost(), secrets.token_bytes(32)
        with Listener(("", 0), authkey=key) as listener:
            dist.broadcast_object_list([(cls_with_init, info.master_addr, listener.address[1], key)])
            peers = [_Peer(listener.accept()) for _ in range(1, self.world_size)]
        self._peers = {peer.rank: peer for peer in peers}
        result_of(self._host.construct(info, cls_with_init))

    @classmethod
    def reserve(cls, pools: Sequence[ResourcePool]) -> None:
        """The processes are there."""

    @classmethod
    def cpu_pool(cls, process_on_nodes: Sequence[int], name: str) -> None:
        """There are no other processes."""

    def spawn(self, prefix_set: Iterable[str]) -> NoReturn:
        raise NotImplementedError("a group that torchrun started has one role")

    def handle(self, rank: int) -> RankHandle:
        raise NotImplementedError("the ranks that torchrun started are called by rank 0 only")

    def ask(self, method: str, within: float) -> list[Any]:
        calls = [peer.call(method, [], {}, "control") for _, peer in sorted(self._peers.items())]
        answers = [result_of(self._host.call(self.role, method, [], {}, "control"))]
        for call in calls:
            try:
                answers.append(result_of(call.result(within)))
            except (TimeoutError, EOFError):
                answers.append(None)
        return answers

    def shutdown(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _submit(
        self, ranks: Sequence[int], method: str, args: list[list[Any]], kwargs: dict[str, list[Any]], lane: str
    ) -> Callable[[], list[Any]]:
        def part(rank: int) -> tuple[list[Any], dict[str, Any]]:
            place = list(ranks).index(rank)
            return [arg[place] for arg in args], {key: arg[place] for key, arg in kwargs.items()}

        outputs: dict[int, Any] = {}
        with self._compute if lane == "compute" else nullcontext():
            for rank in ranks:
                if rank > 0:
                    outputs[rank] = self._peers[rank].call(method, *part(rank), lane)
            if 0 in ranks:  # last: the others compute beside it
                own_args, own_kwargs = part(0)
                outputs[0] = self._host.call(self.role, method, own_args, own_kwargs, lane)
        return lambda: [self._result(outputs[rank], rank, method) for rank in ranks]

    def _result(self, output: Any, rank: int, method: str) -> Any:
        where = "this one" if rank == 0 else self._peers[rank].host
        try:
            found = output.result() if isinstance(output, Future) else output
        except EOFError as gone:
            raise WorkerDiedError("the process of the rank is gone", self.role, rank, where, method) from gone
        if isinstance(found, Failure):
            raise WorkerCallError(found, self.role, rank, where, method)
        return found


def serve_rank(*, device_name: str = "cpu", collective_timeout: float = 1800.0) -> None:
    """What every rank but the first does: be what rank 0 says, and run its calls until it ends.

    Signals are rank 0's to act on.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    info = _joined(device_name, collective_timeout)
    told: list[Any] = [None]
    dist.broadcast_object_list(told)
    cls_with_init, address, port, key = told[0]
    with Client((address, port), authkey=key) as connection:
        _Served(connection, info, cls_with_init).run()
    dist.destroy_process_group()


class _Served:
    """One of those ranks: compute calls run in this thread, in their order; control calls beside it."""

    def __init__(self, connection: Connection, info: RankInfo, cls_with_init: ClassWithInitArgs) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._host, (self._role,) = RankHost(), cls_with_init.roles()
        self._computing: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        connection.send_bytes(pickle.dumps((info.rank, f"{os.uname().nodename} pid {os.getpid()}")))
        result_of(self._host.construct(info, cls_with_init))

    def run(self) -> None:
        """Until rank 0 says that it was all. A failed call may leave it waiting for this rank: then all must end."""
        threading.Thread(target=self._read, daemon=True).start()
        patience = None
        while True:
            try:
                call = self._computing.get(timeout=patience)
            except queue.Empty:
                raise RuntimeError("rank 0 cannot go on after the error above") from None
            if call is None:
                return
            failed = self._answer(*call)
            if failed:
                logger.error("a call failed: %s", failed.traceback)
            patience = _PATIENCE_S if failed else None

    def _answer(self, number: int, *call: Any) -> Failure | None:
        output = self._host.call(self._role, *call)
        with self._sending:
            self._connection.send_bytes(pickle.dumps((number, output)))
        return output if isinstance(output, Failure) else None

    def _read(self) -> None:
        try:
            while (call := pickle.loads(self._connection.recv_bytes())) is not None:
                if call[-1] == "compute":
                    self._computing.put(call)
                else:
                    threading.Thread(target=self._answer, args=call, daemon=True).start()
            self._computing.put(None)
        except (EOFError, OSError):
            logger.error("rank 0 is gone")
            os._exit(1)  # this rank may be in a collective that waits for it


class _Peer:
    """Another rank, as rank 0 calls it. Answers come in any order: each has the number of its call."""

    def __init__(self, connection: Connection) -> None:
        self.rank, self.host = pickle.loads(connection.recv_bytes())
        self._connection, self._sending = connection, threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._calls, self._gone = 0, False
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Future[Any]:
        """Its result; an EOFError where the process is gone."""
        answer: Future[Any] = Future()
        with self._sending:
            self._calls += 1
            number = self._calls
            self._open[number] = answer
            if self._gone:
                answer.set_exception(EOFError())
            else:
                self._connection.send_bytes(pickle.dumps((number, method, args, kwargs, lane)))
        return answer

    def close(self) -> None:
        """Tell it that there is nothing more to do."""
        with self._sending:
            if not self._gone:
                self._connection.send_bytes(pickle.dumps(None))

    def _read(self) -> None:
        try:
            while True:
                number, output = pickle.loads(self._connection.recv_bytes())
                self._open.pop(number).set_result(output)
        except (EOFError, OSError):
            with self._sending:
                self._gone = True
                for answer in self._open.values():
                    answer.set_exception(EOFError())


def _joined(device_name: str, collective_timeout: float) -> RankInfo:
    """Join the process group of all ranks as the one that torchrun made of this process."""
    info = replace(RankInfo.from_environment(), device_name=device_name, collective_timeout=collective_timeout)
    with worker_rank(info):
        Worker().init_process_group()
    return info
