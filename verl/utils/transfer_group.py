"""A process group of its own for weights: the first trainer rank and every rollout rank, beside their own groups."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["TransferAddress", "TransferGroup", "TransferHost", "TransferLostError"]

# All members come at once. One that does not has died on its way.
_JOIN_S = 120.0
# Of one broadcast. The sender may have to bring its weights back to the device before the first.
_BROADCAST_S = 600.0


class TransferLostError(RuntimeError):
    """A member of the group is gone, or does not answer: the group is of no use any more, and a new one is made."""


@dataclass(frozen=True)
class TransferAddress:
    """Where the members of a transfer group meet."""

    host: str
    port: int


class TransferHost:
    """The meeting point, kept open by the first trainer rank. Its port is free because it is already taken."""

    def __init__(self, host: str | None = None, timeout_s: float = _JOIN_S) -> None:
        self.store = dist.TCPStore(
            host or _own_address(),
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        self.address = TransferAddress(self.store.host, self.store.port)


class TransferGroup:
    """Broadcasts from member 0 (the trainer) to the others. Not torch's default group, which each side has already.

    Made by all members at once: `size` is 1 + the number of rollout ranks. `gloo` moves data through host memory;
    `nccl` needs a GPU in every member.
    """

    SENDER = 0

    def __init__(
        self,
        meeting: TransferHost | TransferAddress,
        rank: int,
        size: int,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        timeout_s: float = _BROADCAST_S,
        prefix: str | None = None,
    ) -> None:
        """Each broadcast may take `timeout_s`; a member that dies in one ends it with a TransferLostError.

        `prefix`: of the keys by which members find each other, where others than ours are among them.
        """
        joining = timedelta(seconds=_JOIN_S)
        self.rank, self.size = rank, size
        self.device = torch.device("cpu") if backend == "gloo" else torch.device(device)
        with _lost_if_it_fails():
            if isinstance(meeting, TransferHost):
                store = meeting.store
            else:
                store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=joining)
            # The store lives as long as the group.
            self._store = dist.PrefixStore(prefix or f"weights/{backend}", store)
            self._group = _make_group(backend, self._store, rank, size, joining, timedelta(seconds=timeout_s))

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill `tensor` (on `self.device`) with the sender's, in place."""
        with _lost_if_it_fails():
            self._group.broadcast(tensor, self.SENDER).wait()
        return tensor

    def broadcast_json(self, value: Any = None) -> Any:
        """The sender's value, in every member."""
        data = json.dumps(value).encode() if self.rank == self.SENDER else b""
        length = self.broadcast(torch.tensor([len(data)], dtype=torch.int64, device=self.device))
        text = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if data:
            text.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(text)
        return json.loads(text.cpu().numpy().tobytes())

    def failed_members(self, failed: bool) -> list[int]:
        """Who of all members says that it failed; waits for everyone."""
        flags = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        flags[self.rank] = int(failed)
        with _lost_if_it_fails():
            self._group.allreduce([flags]).wait()
        return flags.nonzero().flatten().tolist()

    def abort(self) -> None:
        """Leave the group whatever its members do; from another thread: a broadcast under way is lost.

        With gloo that one ends when the connection does, with the process at its other end.
        """
        self._group.abort()


@contextmanager
def _lost_if_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransferLostError(f"weights: the transfer between trainer and rollouts was lost: {error}") from error


def _make_group(backend: str, store: Any, rank: int, size: int, joining: timedelta, timeout: timedelta) -> Any:
    if backend == "gloo":
        group = dist.ProcessGroupGloo(store, rank, size, joining)
        group._set_default_timeout(timeout)
        return group
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _errors_reach_the_caller():
            return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ValueError(f"weight transfer: backend {backend!r} is unknown. Use gloo or nccl.")


@contextmanager
def _errors_reach_the_caller() -> Iterator[None]:
    """NCCL groups made here wait, and raise, where they are waited for. By default a thread of theirs that finds a
    peer gone ends the process: here the trainer's.
    """
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _own_address() -> str:
    """This machine as other nodes reach it; the loopback where it has no other name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
