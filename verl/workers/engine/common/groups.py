"""Which ranks there are, which share a node, and small sums over them."""

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
    """The ranks on this rank's machine; the leader (the lowest) reads files for all of them."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def is_leader(self) -> bool:
        return dist.get_rank() == self.leader


def ensure_process_group(device: torch.device) -> None:
    """Join the process group the environment describes (as torchrun sets it), or be the only rank of one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        # Threads of a group that is there when the interpreter is gone end the process with std::terminate.
        atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def with_index(device: torch.device) -> torch.device:
    """`cuda` is the current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def node_group() -> NodeGroup:
    """Found by comparing host names; a collective."""
    world = dist.get_world_size()
    if world == 1:
        return NodeGroup((0,), None)
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, socket.gethostname())
    mine, nodes = hosts[dist.get_rank()], list(dict.fromkeys(hosts))
    members = {node: tuple(rank for rank, host in enumerate(hosts) if host == node) for node in nodes}
    if len(nodes) == 1:
        return NodeGroup(members[mine], None)
    # Every rank takes part in making every group.
    groups = {node: dist.new_group(list(ranks)) for node, ranks in members.items()}
    return NodeGroup(members[mine], groups[mine])


def group_for_files() -> dist.ProcessGroup | None:
    """All ranks again, for what is written while they compute: its collectives never mix with training's. A collective.

    None where one rank is all there is.
    """
    # A rank may wait for as long as another one writes.
    return dist.new_group(backend="gloo", timeout=timedelta(hours=1)) if dist.get_world_size() > 1 else None


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """What one rank raises inside, all raise: none is left waiting for it in the next collective. A collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - raised again below, once the others know
        error = raised
    if dist.get_world_size() > 1:
        told: list[tuple[int | None, str] | None] = [None] * dist.get_world_size()
        mine = None if error is None else (getattr(error, "errno", None), str(error))
        dist.all_gather_object(told, mine, group=group)
        failures = [
            (number, f"rank {rank}: {each[1]}") for rank, each in enumerate(told) if each for number in each[:1]
        ]
        # A rank whose disk is full knows the cause; others may only know that something failed.
        number, text = next((each for each in failures if each[0]), failures[0] if failures else (None, ""))
        if failures and (error is None or (number and not getattr(error, "errno", None))):
            error = OSError(number, text) if number else RuntimeError(text)
    if error is not None:
        raise error


def summed(values: Sequence[float], device: torch.device) -> list[float]:
    """Each value added up over all ranks, in float64."""
    return _reduced(values, device, dist.ReduceOp.SUM)


def largest(value: int, device: torch.device) -> int:
    """The largest of all ranks' values."""
    return int(_reduced([value], device, dist.ReduceOp.MAX)[0])


def _reduced(values: Sequence[float], device: torch.device, how: dist.ReduceOp.RedOpType) -> list[float]:
    if dist.get_world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, how)
    return total.tolist()
