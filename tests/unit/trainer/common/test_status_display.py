"""How a status is shown: a status line or bars on a terminal, a line now and then elsewhere, never at a cost."""

from __future__ import annotations

import gc
import io
import logging
import re
import subprocess
import sys
import threading
import time
import weakref

import pytest

from tests.support.terminal import run_on_terminal
from verl.trainer.common import status_display
from verl.trainer.common.run_status import StatusSnapshot
from verl.trainer.common.status_display import ProgressLog, StartupProgressLog, StatusText, show_status
from verl.utils.console import startup_phase

PROGRAM = """
import time
from verl.trainer.common.run_status import StatusSnapshot
from verl.trainer.common.status_display import show_status
with show_status(lambda: StatusSnapshot(3, 40, "rollout", 2.0, 123, 512), "full"):
    time.sleep(1.3)
"""
LINE_PROGRAM = PROGRAM.replace("full", "line").replace(
    "    time.sleep(1.3)",
    """\
    for step in range(6):
        print(f"step {step}: reward_mean=0.5", flush=True)
        time.sleep(0.3)""",
)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="verl")
    return caplog


def test_the_status_line_has_startup_phase_step_samples_and_remaining_time():
    text = StatusText()
    starting = StatusSnapshot(
        0, 40, starting=True, startup="weights of Actor", startup_seconds=12.3, activity="loading"
    )
    assert text(StatusSnapshot(0, 0, starting=True), 0.0) == "starting"
    assert text(starting, 10.0) == "start-up: weights of Actor (loading), 12 s so far"
    assert text(StatusSnapshot(0, 40, "rollout", 2.0, 5, 512), 100.0) == "step 1/40 | rollout 5/512 2 s"
    later = StatusSnapshot(4, 40, "train_actor", 7.6)
    assert text(later, 180.0) == "step 5/40 | train_actor 8 s | ETA 12 min 00 s", "36 steps of 20 s"
    assert text(later, 187.0).endswith("ETA 11 min 53 s")
    assert text(StatusSnapshot(40, 40), 900.0) == "step 40/40 | ETA 0 s"


def test_elsewhere_a_startup_phase_is_logged_every_eight_seconds(said):
    show = StartupProgressLog()
    for seconds in (2, 6, 9, 11, 16, 18):
        show(StatusSnapshot(0, 0, starting=True, startup="Ray", startup_seconds=seconds))
    show(StatusSnapshot(0, 0, starting=True, startup="data", startup_seconds=7))
    show(StatusSnapshot(0, 9, "validation", 9.0, 1, 4, starting=True))
    show(StatusSnapshot(0, 9, "validation", 19.0, 1, 4))
    assert [record.getMessage() for record in said.records] == [
        "start-up: Ray, 9 s so far",
        "start-up: Ray, 18 s so far",
        "step 1/9: validation 1/4, 9 s",
    ]


def test_a_controller_without_a_status_is_awaited_and_phases_of_this_process_are_shown():
    now = status_display.with_startup(None, time.monotonic() - 20)
    assert (now.startup, round(now.startup_seconds)) == ("controller process", 20)
    with startup_phase("Ray"):
        assert status_display.with_startup(None, 0.0).startup == "Ray"
        assert status_display.with_startup(StatusSnapshot(0, 9, startup="data"), 0.0).startup == "data"
    assert status_display.with_startup(StatusSnapshot(3, 9), 0.0) == StatusSnapshot(3, 9)


def test_a_terminal_has_the_status_below_the_lines_and_a_file_only_the_lines():
    quiet = subprocess.run([sys.executable, "-c", LINE_PROGRAM], capture_output=True, text=True, check=True)
    lines = [f"step {step}: reward_mean=0.5" for step in range(6)]
    assert (quiet.stdout.splitlines(), quiet.stderr) == (lines, "")
    drawn = run_on_terminal(LINE_PROGRAM, columns=30)
    assert "\rstep 4/40 | rollout 123/512 …" in drawn.replace("\x1b[2K", ""), "cut to the width"
    assert screen(drawn) == lines


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
    monkeypatch.setattr(status_display, "LOG_POLL_S", 0.01)
    with show_status(lambda: StatusSnapshot(0, 2, "rollout", 40.0, 1, 8)):
        wait_until(lambda: "step 1/2: rollout 1/8, 40 s" in said.text)
        assert progress_threads()
    assert not progress_threads()
    assert said.text.count("rollout") == 1


def test_a_standing_that_fails_ends_the_showing_and_not_the_run(said, monkeypatch):
    monkeypatch.setattr(status_display, "LOG_POLL_S", 0.01)

    def broken() -> StatusSnapshot:
        raise ConnectionError("nobody there")

    with show_status(broken):
        wait_until(lambda: not progress_threads())
        result = "the run goes on"
    assert result == "the run goes on"
    assert said.text.count("progress is not shown any more: ConnectionError('nobody there')") == 1


@pytest.mark.slow
def test_a_terminal_shows_bars_and_a_file_nothing_of_a_short_phase():
    quiet = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert quiet.stderr == ""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", run_on_terminal(PROGRAM, columns=120))
    assert re.search(r"steps +[━╸╺]+ +3/40 ", plain)
    assert re.search(r"rollout +[━╸╺]+ +123/512 ", plain)


def test_whoever_prints_while_the_bars_are_closed_has_a_stream_to_the_end(monkeypatch):
    """`print` borrows sys.stdout: freed under it, a run whose terminal closed ended with a RecursionError of rich's."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    with status_display.progress_bars() as show:
        between = weakref.ref(sys.stdout)
        assert type(between()).__module__ == "rich.file_proxy"
        show.rows.stop()
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


def screen(drawn: str) -> list[str]:
    """The lines that remain on the terminal: `\\r` and the sequence that clears a line are interpreted."""
    rows = []
    for row in drawn.replace("\r\n", "\n").split("\n"):
        rows.append(row.rpartition("\x1b[2K")[2].rpartition("\r")[2])
    assert "\x1b" not in "".join(rows)
    return [row for row in rows if row]
