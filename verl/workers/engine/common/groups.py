"""Process groups of the ranks, collective error handling, and small reductions."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class NodeGroup:
    """The ranks on this node; the leader (the lowest rank) reads files for all of them."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def is_leader(self) -> bool:
        return dist.get_rank() == self.leader


def ensure_process_group(device: torch.device) -> None:
    """Join the process group that the environment describes (as torchrun sets it), or create a group of one rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        # Threads of a group that outlives the interpreter abort the process with std::terminate.
        atexit.register(_destroy_group)


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def with_device_index(device: torch.device) -> torch.device:
    """Return `cuda` with the index of the current GPU; other devices unchanged."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def node_group() -> NodeGroup:
    """Return the ranks with the same host name. A collective."""
    world = dist.get_world_size()
    if world == 1:
        return NodeGroup((0,), None)
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, socket.gethostname())
    own_host, nodes = hosts[dist.get_rank()], list(dict.fromkeys(hosts))
    members = {node: tuple(rank for rank, host in enumerate(hosts) if host == node) for node in nodes}
    if len(nodes) == 1:
        return NodeGroup(members[own_host], None)
    # Every rank must take part in creating every group.
    groups = {node: dist.new_group(list(ranks)) for node, ranks in members.items()}
    return NodeGroup(members[own_host], groups[own_host])


def background_group() -> dist.ProcessGroup | None:
    """Create a group of all ranks for background writes, separate from the collectives of training; None with a single
    rank. A collective."""
    # Long timeout: a rank may have to wait while another rank writes its files.
    return dist.new_group(backend="gloo", timeout=timedelta(hours=1)) if dist.get_world_size() > 1 else None


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context: an exception of one rank is raised on all ranks, so that none waits in the next collective. A
    collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - raised below, after the exchange
        error = raised
    if dist.get_world_size() > 1:
        errors: list[tuple[int | None, str] | None] = [None] * dist.get_world_size()
        own = None if error is None else (getattr(error, "errno", None), str(error))
        dist.all_gather_object(errors, own, group=group)
        failures = [(other[0], f"rank {rank}: {other[1]}") for rank, other in enumerate(errors) if other]
        # An error with an errno (disk full) is the cause; errors of other ranks may be its consequences.
        errno, text = next((failure for failure in failures if failure[0]), failures[0] if failures else (None, ""))
        if failures and (error is None or (errno and not getattr(error, "errno", None))):
            error = OSError(errno, text) if errno else RuntimeError(text)
    if error is not None:
        raise error


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return each value summed over all ranks, in float64."""
    return _all_reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(value: int, device: torch.device) -> int:
    """Return the maximum over all ranks."""
    return int(_all_reduce([value], device, dist.ReduceOp.MAX)[0])


def _all_reduce(values: Sequence[float], device: torch.device, operation: dist.ReduceOp.RedOpType) -> list[float]:
    if dist.get_world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, operation)
    return total.tolist()
