"""Where a run stands, and how that is shown: bars on a terminal, a line now and then elsewhere, never at a cost."""

from __future__ import annotations

import gc
import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, Worker, WorkerCallError
from verl.single_controller.base.decorator import BatchShard, Dispatch, register
from verl.single_controller.base.rank_host import RankHost
from verl.single_controller.base.worker import RankInfo
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.common import run_status
from verl.trainer.common.run_status import Phases, ProgressLog, RunStatus, StatusSnapshot, progress_bar
from verl.utils.progress import expect, tick

PROGRAM = """
import time
from verl.trainer.common.run_status import StatusSnapshot
from verl.trainer.common.run_status import progress_bar
with progress_bar(lambda: StatusSnapshot(3, 40, "rollout", 2.0, 123, 512)):
    time.sleep(1.3)
"""


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


def test_a_line_is_said_for_every_30_seconds_of_a_phase_and_none_for_short_ones(said):
    show = ProgressLog()
    for seconds in (5, 25, 31, 40, 59, 62, 92):
        show(StatusSnapshot(3, 40, "rollout", seconds, int(seconds), 512))
    show(StatusSnapshot(3, 40, "reward", 4, 1, 512))
    show(StatusSnapshot(3, 40, "save_checkpoint", 33))
    show(StatusSnapshot(4, 40, "rollout", 29, 29, 512))
    show(StatusSnapshot(4, 40, "rollout", 35, 35, 512))
    show(StatusSnapshot(4, 40, "rollout", 31, 64, 512))  # another one: this step generates twice
    show(StatusSnapshot(4, 40, "", 90))
    assert [record.getMessage() for record in said.records] == [
        "step 4/40: rollout 31/512, 31 s",
        "step 4/40: rollout 62/512, 62 s",
        "step 4/40: rollout 92/512, 92 s",
        "step 4/40: save_checkpoint, 33 s",
        "step 5/40: rollout 35/512, 35 s",
        "step 5/40: rollout 64/512, 31 s",
    ]


def test_without_a_terminal_lines_come_while_the_block_runs_and_the_thread_ends_with_it(said, monkeypatch):
    monkeypatch.setattr(run_status, "_LOG_POLL_S", 0.01)
    with progress_bar(lambda: StatusSnapshot(0, 2, "rollout", 40.0, 1, 8)):
        wait_until(lambda: "step 1/2: rollout 1/8, 40 s" in said.text)
        assert progress_threads()
    assert not progress_threads()
    assert said.text.count("rollout") == 1


def test_a_standing_that_fails_ends_the_showing_and_not_the_run(said, monkeypatch):
    monkeypatch.setattr(run_status, "_LOG_POLL_S", 0.01)

    def broken() -> StatusSnapshot:
        raise ConnectionError("nobody there")

    with progress_bar(broken):
        wait_until(lambda: not progress_threads())
        result = "the run goes on"
    assert result == "the run goes on"
    assert said.text.count("progress is not shown any more: ConnectionError('nobody there')") == 1


def test_a_terminal_shows_bars_and_a_file_nothing_of_a_short_phase():
    quiet = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert quiet.stderr == ""
    shown, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=terminal, env=environment)
    process.wait()
    os.close(terminal)
    text = b""
    while True:
        try:
            part = os.read(shown, 65536)
        except OSError:
            break
        if not part:
            break
        text += part
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.decode())
    assert re.search(r"steps +[━╸╺]+ +3/40 ", plain)
    assert re.search(r"rollout +[━╸╺]+ +123/512 ", plain)


def test_whoever_prints_while_the_bars_are_closed_has_a_stream_to_the_end(monkeypatch):
    """`print` borrows sys.stdout: freed under it, a run whose terminal closed ended with a RecursionError of rich's."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    with run_status._bars() as show:
        between = weakref.ref(sys.stdout)
        assert type(between()).__module__ == "rich.file_proxy"
        show._rows.stop()
        assert sys.stdout is not between()
    del show
    gc.collect()
    assert between() is not None


def progress_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "progress"]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
