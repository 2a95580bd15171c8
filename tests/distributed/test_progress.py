"""Ranks say how far their compute call is, beside it; the group's sum is the caller's number of rows."""

from __future__ import annotations

import threading
import time

import torch

from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup
from verl.trainer.common.run_status import RunStatus, StatusSnapshot


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, auto_padding=True)


def wait_for(console: RunStatus, done: int, units: int) -> StatusSnapshot:
    deadline = time.monotonic() + 120
    while (now := console.snapshot()).done != done or now.units != units:
        assert time.monotonic() < deadline, now
        time.sleep(0.005)
    return now


def test_rows_done_are_told_while_the_call_runs(counters: WorkerGroup):
    """Two ranks (or one): 7 rows, so that the last rank's share is filled up with a row that does not count."""
    ranks, console = counters.world_size, RunStatus(total_steps=1)
    assert counters.progress() == [(0, 0)] * ranks, "nothing runs"
    result: list[DataProto] = []
    call = threading.Thread(target=lambda: result.append(counters.square_gated(batch(7)).get()))
    with console.phase("gen", counters):
        call.start()
        try:
            assert wait_for(console, 0, 7).phase == "rollout"
            counters.allow_rows(2)
            wait_for(console, 2 * ranks, 7)
        finally:
            counters.allow_rows(7)
            call.join()
        assert (console.snapshot().done, console.snapshot().units) == (0, 0), "the call is over"
    assert result[0].batch["x"].tolist() == [0, 1, 4, 9, 16, 25, 36]
