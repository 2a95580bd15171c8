"""One member of a weight transfer loses its connection: the others, and the ranks that share its engine, fail at once.

The members are threads with real gloo connections; the ranks of an engine exchange errors through a barrier.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from verl.types.weights import TensorSpec, WeightMismatchError, WeightsRefusedError
from verl.utils.transfer_group import TransferGroup, TransferHost, TransferLostError
from verl.workers.sharding_manager import BroadcastReceiver, BroadcastSender

RANKS = 2
TIMEOUT_S = 120.0
"""Time limit of a broadcast: far more than a test may take."""
PROMPT_S = 30.0


def in_group(actions: list[Callable[[TransferGroup], Any]]) -> list[Any]:
    """Run each action as a member of one group; return their results or errors."""
    host = TransferHost("127.0.0.1")
    # An action may leave the group at once; without the barrier, others might still be connecting to it.
    joined = threading.Barrier(len(actions), timeout=PROMPT_S)

    def run(rank: int) -> Any:
        group = TransferGroup(host if rank == 0 else host.address, rank, len(actions), timeout_s=TIMEOUT_S)
        joined.wait()
        try:
            return actions[rank](group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(run, range(len(actions))))


def test_a_member_that_leaves_ends_the_calls_of_all_others():
    def broadcast(group: TransferGroup) -> None:
        for _ in range(1000):
            group.broadcast(torch.zeros(100_000))

    def leave(group: TransferGroup) -> None:
        group.broadcast(torch.zeros(100_000))
        group.leave()
        with pytest.raises(TransferLostError, match="left"):
            group.broadcast(torch.zeros(1))
        group.leave()
        group.abort()

    start = time.monotonic()
    outcomes = in_group([broadcast, leave, broadcast, broadcast])
    assert [type(outcome) for outcome in outcomes] == [TransferLostError, type(None), *[TransferLostError] * 2]
    assert time.monotonic() - start < PROMPT_S


class SharedEngine:
    """State of an engine of several ranks, whose collectives wait for all ranks."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=PROMPT_S)
        self.errors: list[Exception | None] = [None] * RANKS


class Rank:
    """A rank of the engine."""

    weight_dtype = torch.float32

    def __init__(self, engine: SharedEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self.failed: list[Exception] = []

    def requested_rows(self) -> None: ...
    def load_bucket(self, tensors: Any) -> None: ...

    def begin_update(self, version: int, manifest: Any) -> None:
        self._engine.barrier.wait()  # a follower waits for the leader to halt

    def finish_update(self, fingerprint: Any) -> None:
        if (error := self.exchange_error(None)) is not None:
            raise error

    def fail_update(self, error: Exception) -> None:
        self.failed.append(error)

    def exchange_error(self, error: Exception | None) -> Exception | None:
        self._engine.errors[self._rank] = error
        self._engine.barrier.wait()
        errors = list(self._engine.errors)
        self._engine.barrier.wait()
        return error or next((error for error in errors if error is not None), None)


class Source:
    """A trainer with one weight per bucket."""

    weights = {f"w{number}": torch.ones(4) for number in range(3)}  # noqa: RUF012

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails

    def manifest(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in self.weights.items()}

    def buckets(self, *_: Any) -> Any:
        yield from ({name: value} for name, value in self.weights.items())
        if self._fails:
            raise FloatingPointError("the trainer broke")


def lose_before(group: TransferGroup, header: int) -> TransferGroup:
    """Close the connections of this member before its header of this number."""
    call_before(group, header, group.leave)
    return group


def call_before(group: TransferGroup, header: int, action: Callable[[], None]) -> None:
    """Call `action` before this member receives its header of this number."""
    broadcast, left = group.broadcast_json, iter(range(header, -1, -1))

    def broadcast_json() -> Any:
        if next(left) == 0:
            action()
        return broadcast()

    group.broadcast_json = broadcast_json  # type: ignore[method-assign]


LAST = 1 + len(Source.weights)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("header", [0, 1, 2, LAST])
@pytest.mark.parametrize("loser", range(RANKS))
def test_ranks_that_share_an_engine_fail_if_one_of_them_loses_its_connection(header, loser, fails):
    engine = SharedEngine()
    ranks = [Rank(engine, rank) for rank in range(RANKS)]

    def receive(rank: int, group: TransferGroup) -> Any:
        return BroadcastReceiver(lose_before(group, header) if rank == loser else group).receive(ranks[rank])

    def send(group: TransferGroup) -> Any:
        return BroadcastSender(group, torch.float32, bucket_bytes=1).send(Source(fails), 1)

    start = time.monotonic()
    receivers = [lambda group, rank=rank: receive(rank, group) for rank in range(RANKS)]
    sender, *received = in_group([send, *receivers])
    assert time.monotonic() - start < PROMPT_S
    errors = (FloatingPointError,) if fails and header == LAST else (TransferLostError, FloatingPointError)
    assert isinstance(sender, errors)
    assert [type(outcome) for outcome in received] == [TransferLostError] * RANKS
    assert [len(rank.failed) for rank in ranks] == [0 if header == 0 else 1] * RANKS


@pytest.mark.parametrize("header", [0, 1, LAST])
def test_a_rank_that_cannot_receive_ends_the_transfer_of_all_others(header):
    """For example, because it has too little memory for a bucket."""
    engine = SharedEngine()
    ranks = [Rank(engine, rank) for rank in range(RANKS)]

    def receive(rank: int, group: TransferGroup) -> Any:
        if rank == 1:
            call_before(group, header, _run_out_of_memory)
        return BroadcastReceiver(group).receive(ranks[rank])

    def send(group: TransferGroup) -> Any:
        return BroadcastSender(group, torch.float32, bucket_bytes=1).send(Source(), 1)

    start = time.monotonic()
    outcomes = in_group([send, *(lambda group, rank=rank: receive(rank, group) for rank in range(RANKS))])
    assert time.monotonic() - start < PROMPT_S
    assert [type(outcome) for outcome in outcomes] == [TransferLostError, TransferLostError, torch.OutOfMemoryError]
    assert [len(rank.failed) for rank in ranks] == [0 if header == 0 else 1] * RANKS


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("no memory for the bucket")


def test_a_lost_connection_does_not_hide_the_error_before_it():
    engine = SharedEngine()
    ranks = [Rank(engine, rank) for rank in range(RANKS)]

    def break_device(_: Any) -> None:
        raise ValueError("the device broke")

    ranks[0].load_bucket = break_device  # type: ignore[method-assign]

    def receive(rank: int, group: TransferGroup) -> Any:
        return BroadcastReceiver(lose_before(group, 2) if rank == 0 else group).receive(ranks[rank])

    def send(group: TransferGroup) -> Any:
        return BroadcastSender(group, torch.float32, bucket_bytes=1).send(Source(), 1)

    outcomes = in_group([send, *(lambda group, rank=rank: receive(rank, group) for rank in range(RANKS))])
    assert [type(outcome) for outcome in outcomes] == [TransferLostError] * 3
    assert "ValueError: the device broke" in str(outcomes[1])
    assert isinstance(outcomes[1].__cause__, ValueError)
    assert "the device broke" in str(engine.errors[0])


def test_an_engine_of_another_dtype_is_refused_on_all_its_ranks():
    engine = SharedEngine()
    ranks = [Rank(engine, rank) for rank in range(RANKS)]
    ranks[1].weight_dtype = torch.bfloat16

    def receive(rank: int, group: TransferGroup) -> Any:
        return BroadcastReceiver(group).receive(ranks[rank])

    def send(group: TransferGroup) -> Any:
        return BroadcastSender(group, torch.float32, bucket_bytes=1).send(Source(), 1)

    outcomes = in_group([send, *(lambda group, rank=rank: receive(rank, group) for rank in range(RANKS))])
    assert [type(outcome) for outcome in outcomes] == [WeightsRefusedError, *[WeightMismatchError] * RANKS]
    assert not any(rank.failed for rank in ranks)


def test_a_rank_that_leaves_an_nccl_group_does_not_wait_for_its_peers():
    """They may still be in a broadcast, which leaving does not end."""
    exchanges: list[Exception | None] = []
    rank = Rank(SharedEngine(), 0)
    rank.exchange_error = exchanges.append  # type: ignore[method-assign]

    def receive(group: TransferGroup) -> Any:
        group.ends_when_left = False
        call_before(group, 0, _run_out_of_memory)
        return BroadcastReceiver(group).receive(rank)

    def send(group: TransferGroup) -> Any:
        return BroadcastSender(group, torch.float32, bucket_bytes=1).send(Source(), 1)

    assert isinstance(in_group([send, receive])[1], torch.OutOfMemoryError)
    assert not exchanges
