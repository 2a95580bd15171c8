"""A process group of its own for weights: the first trainer rank and every rollout rank, beside their own groups."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["TransferAddress", "TransferGroup", "TransferHost"]


@dataclass(frozen=True)
class TransferAddress:
    """Where the members of a transfer group meet."""

    host: str
    port: int


class TransferHost:
    """The meeting point, kept open by the first trainer rank. Its port is free because it is already taken."""

    def __init__(self, host: str | None = None, timeout_s: float = 1800.0) -> None:
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
        timeout_s: float = 1800.0,
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        if isinstance(meeting, TransferHost):
            store = meeting.store
        else:
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
        self.rank, self.size = rank, size
        self.device = torch.device("cpu") if backend == "gloo" else torch.device(device)
        # The store lives as long as the group.
        self._store = store
        self._group = _make_group(backend, dist.PrefixStore(f"weights/{backend}", store), rank, size, timeout)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill `tensor` (on `self.device`) with the sender's, in place."""
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
        self._group.allreduce([flags]).wait()
        return flags.nonzero().flatten().tolist()

    def close(self) -> None:
        """Leave the group."""
        self._group.shutdown()


def _make_group(backend: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ValueError(f"weight transfer: backend {backend!r} is unknown. Use gloo or nccl.")


def _own_address() -> str:
    """This machine as other nodes reach it; the loopback where it has no other name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
