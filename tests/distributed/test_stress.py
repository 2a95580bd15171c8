"""Larger groups and repeated deaths: the rest of the controller's proof, outside the CI tier."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch

from tests.support.workers import CollectiveWorker, Counter
from verl.protocol import DataProto
from verl.single_controller.base import WorkerDiedError
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

pytestmark = pytest.mark.slow


def test_eight_ranks_split_and_join(ray_cluster):
    pool = RayResourcePool([8], use_gpu=False)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Counter)) as group:
        for rows in (1, 7, 8, 9, 64, 1001):
            result = group.square(DataProto.from_dict({"x": torch.arange(rows)}))
            assert torch.equal(result.batch["x"], torch.arange(rows) ** 2)
    pool.release()


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_killed_at_a_random_moment_is_always_a_named_error(start, seed):
    group = start(CollectiveWorker)
    group.setup()
    rng = random.Random(seed)
    pids = [int(host.rsplit(" ", 1)[1]) for host in group._hosts]
    victim = rng.randrange(2)
    killer = threading.Timer(rng.uniform(0, 1.0), os.kill, (pids[victim], signal.SIGKILL))
    killer.start()
    deadline = time.monotonic() + 120

    def call_until_it_fails() -> None:
        while time.monotonic() < deadline:
            group.add_total(DataProto.from_dict({"x": torch.arange(4)}))

    with pytest.raises(WorkerDiedError, match=f"rank {victim}") as caught:
        call_until_it_fails()
    assert time.monotonic() < deadline, "the error came by itself"
    assert caught.value.method == "add_total"
