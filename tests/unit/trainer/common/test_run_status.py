"""Status of a run: step, phase, and the samples that groups and the controller have processed."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, Worker, WorkerCallError
from verl.single_controller.base.decorator import BatchShard, Dispatch, register
from verl.single_controller.base.worker import RankHost, RankInfo
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.common.run_status import Phases, RunStatus
from verl.utils.console import startup_phase
from verl.utils.progress import expect, tick


class Counting(Worker):
    """Ticks what it is told, and asks where the run stands after each."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self, rows: int, after_each: object) -> str:
        expect(rows)
        for _ in range(rows):
            tick()
            after_each()
        return "worked"

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def over(self, data: DataProto, after_each: object) -> DataProto:
        self.work(len(data), after_each)
        return data


class Uncounted(Counting):
    """A worker whose count fails."""

    def progress(self) -> tuple[int, int]:
        raise ArithmeticError("cannot count")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="verl")
    return caplog


def local(cls: type) -> LocalWorkerGroup:
    return LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(cls))


def test_the_standing_names_step_and_phase_and_returns_to_the_outer_one():
    console = RunStatus(total_steps=10, done_steps=2)
    with console.phase("step"):
        with console.phase("gen"):
            assert (console.snapshot().step, console.snapshot().phase) == (2, "rollout")
        assert console.snapshot().phase == "step"
        console.step_done()
    assert (console.snapshot().step, console.snapshot().total, console.snapshot().phase) == (3, 10, "")


def test_the_standing_counts_what_the_groups_of_the_phase_and_the_controller_do():
    console, workers, idle = RunStatus(10), local(Counting), local(Counting)
    phases, seen = Phases(console), []

    def look() -> None:
        now = console.snapshot()
        seen.append((now.phase, now.done, now.units))

    with phases("update_actor", workers, idle, None):
        workers.work(3, look)
        look()
    with phases("reward"):
        expect(2)
        tick()
        look()
    assert seen == [
        ("train_actor", 1, 3),
        ("train_actor", 2, 3),
        ("train_actor", 3, 3),
        ("train_actor", 0, 0),
        ("reward", 1, 2),
    ], "each call from its own start; nothing is left of it afterwards"
    assert set(phases.seconds) == {"update_actor", "reward"}


@pytest.mark.parametrize(("shard", "counts"), [({"fillers": 1}, (4, 4)), ({"collect": False}, (0, 0))])
def test_a_row_is_counted_once_whoever_else_has_it(shard, counts):
    """Not where it only fills up a rank's share, nor on the other ranks of a tensor-parallel group."""
    host, seen = RankHost(), []
    host.construct(RankInfo(1, 2, 1, 2, "127.0.0.1", 0), ClassWithInitArgs(Counting))
    data = DataProto.from_dict({"x": torch.arange(5)})
    look = lambda: seen.append(host.call("Counting", "progress", [], {}, "control"))  # noqa: E731
    host.call("Counting", "over", [BatchShard(data, **shard), look], {}, "compute")
    assert seen[-1] == counts


def test_a_count_that_fails_is_said_once_and_costs_nothing_else(said):
    console, workers = RunStatus(10), local(Uncounted)
    standings = []
    for _ in range(2):
        with console.phase("gen", workers):
            assert workers.work(3, lambda: standings.append(console.snapshot())) == ["worked"]
    assert [(now.phase, now.units) for now in standings] == [("rollout", 0)] * 6
    assert said.text.count("progress inside phases is not shown any more") == 1
    assert "cannot count" in said.text


def test_a_call_that_fails_leaves_no_count():
    workers = local(Counting)
    with pytest.raises(WorkerCallError, match="ZeroDivisionError"):
        workers.work(3, lambda: 1 / 0)
    assert workers.progress() == [(0, 0)]


def test_a_phase_starts_no_thread():
    before = threading.enumerate()
    console = RunStatus(10)
    with console.phase("gen", local(Counting)):
        console.snapshot()
        assert threading.enumerate() == before


def test_the_status_names_the_startup_phase_of_the_process():
    status = RunStatus(0)
    assert status.snapshot().startup == ""
    with startup_phase("data"):
        assert status.snapshot().startup == "data"
    assert status.snapshot().startup == ""
