"""Process group for weight sync: the first trainer rank and every rollout rank, in addition to their own groups."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.utils.py_functional import temp_env_var

__all__ = ["TransferAddress", "TransferGroup", "TransferHost", "TransferLostError"]

# Time limit of joining. All members join at the same time: a member that has not joined by then has died.
_JOIN_S = 120.0
# Time limit of one broadcast. Before the first one, the sender may have to load its weights back to the device.
_BROADCAST_S = 600.0


class TransferLostError(RuntimeError):
    """A member of the group has died or does not respond: the group is unusable and must be created again."""


@dataclass(frozen=True)
class TransferAddress:
    """Address of the store through which the members of a transfer group find each other."""

    host: str
    port: int


class TransferHost:
    """The store of a transfer group, kept by the first trainer rank. It binds a free port itself, so none can clash."""

    def __init__(self, host: str | None = None) -> None:
        self.store = dist.TCPStore(
            host or _host_address(),
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_JOIN_S),
        )
        self.address = TransferAddress(self.store.host, self.store.port)


class TransferGroup:
    """Broadcasts from member 0 (the trainer) to the others. Independent of torch's default group of each side.

    All members create it at the same time: `size` is 1 + the number of rollout ranks. `gloo` moves data through host
    memory; `nccl` needs a GPU in every member.
    """

    SENDER = 0

    def __init__(
        self,
        store: TransferHost | TransferAddress,
        rank: int,
        size: int,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        timeout_s: float = _BROADCAST_S,
        prefix: str | None = None,
    ) -> None:
        """Each broadcast may take `timeout_s`. If it fails in a member, or a member dies, all raise TransferLostError:
        with gloo at once, with NCCL at this limit or when they call `abort`.

        `prefix` of the keys in the store: for groups with third-party members.
        """
        joining = timedelta(seconds=_JOIN_S)
        self.rank, self.size = rank, size
        self.ends_when_left = backend == "gloo"
        """Whether `leave` ends the calls of the other members."""
        self.device = torch.device("cpu") if backend == "gloo" else torch.device(device)
        with _as_transfer_lost():
            if isinstance(store, TransferHost):
                tcp_store = store.store
            else:
                tcp_store = dist.TCPStore(store.host, store.port, is_master=False, timeout=joining)
            # Kept: the store must live as long as the group.
            self._store = dist.PrefixStore(prefix or f"weights/{backend}", tcp_store)
            self._group: Any = _make_group(backend, self._store, rank, size, joining, timedelta(seconds=timeout_s))

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the sender's tensor into `tensor` (on `self.device`) of every other member."""
        with self._leave_if_lost():
            self._group.broadcast(tensor, self.SENDER).wait()
        return tensor

    def broadcast_json(self, value: Any = None) -> Any:
        """Return the sender's value in every member."""
        data = json.dumps(value).encode() if self.rank == self.SENDER else b""
        length = self.broadcast(torch.tensor([len(data)], dtype=torch.int64, device=self.device))
        text = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if data:
            text.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(text)
        return json.loads(text.cpu().numpy().tobytes())

    def members_with_flag(self, flag: bool) -> list[int]:
        """Return the ranks that passed `flag=True`; waits for all members."""
        flags = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        flags[self.rank] = int(flag)
        with self._leave_if_lost():
            self._group.allreduce([flags]).wait()
        return flags.nonzero().flatten().tolist()

    def abort(self) -> None:
        """Leave the group without waiting for its members; may be called from another thread during a broadcast.

        With gloo, that broadcast only ends when its connection is lost: when the member at the other end leaves or its
        process ends.
        """
        group = self._group
        if group is not None:
            group.abort()

    def leave(self) -> None:
        """Close the connections. Later calls raise TransferLostError. Not during a broadcast of another thread.

        With gloo, the calls of the other members fail now and not at their time limit. With NCCL, members on the same
        node do not notice it and must call `abort`.
        """
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):  # NCCL, after an error of CUDA: the connections end with the process
                group.abort()
        del group  # gloo closes connections when the group is freed

    @contextmanager
    def _leave_if_lost(self) -> Iterator[None]:
        if self._group is None:
            raise TransferLostError("weights: this process has left the transfer group. Create a new group.")
        try:
            with _as_transfer_lost():
                yield
        except TransferLostError:
            self.leave()
            raise


@contextmanager
def _as_transfer_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransferLostError(f"weights: the transfer between trainer and rollouts failed: {error}") from error


def _make_group(backend: str, store: Any, rank: int, size: int, joining: timedelta, timeout: timedelta) -> Any:
    if backend == "gloo":
        group = dist.ProcessGroupGloo(store, rank, size, joining)
        group._set_default_timeout(timeout)
        return group
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _raise_nccl_errors():
            return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ValueError(f"weight transfer: backend {backend!r} is unknown. Use gloo or nccl.")


@contextmanager
def _raise_nccl_errors() -> Iterator[None]:
    """Let NCCL groups created inside raise errors in `wait`. By default, their watchdog thread ends the process (the
    trainer) when a peer is gone.
    """
    with temp_env_var("TORCH_NCCL_BLOCKING_WAIT", "1"), temp_env_var("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        yield


def _host_address() -> str:
    """Return the address of this machine's host name; the loopback address if the name cannot be resolved."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
