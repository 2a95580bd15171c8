"""A real pseudo-terminal that closes, and a pipe whose reader ends: the program goes on, and its lines into a file."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import logging, pathlib, signal, sys, time
from verl.utils.logging_setup import set_fallback_file, survive_lost_terminal

survive_lost_terminal()
set_fallback_file("kept.log")
from verl.trainer.recovery.signals import stop_on_signals
from verl.trainer.common.run_status import StatusSnapshot
from verl.trainer.common.status_display import show_status
from verl.utils.logging_setup import setup_logging

setup_logging(console=sys.argv[1])
logger = logging.getLogger("verl.test")
# Whoever runs the tests may ignore it.
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
ended = pathlib.Path("end")
now = StatusSnapshot(3, 10, "gen", 1.0, 1, 2)
with stop_on_signals(lambda: None) as request, show_status(lambda: now, sys.argv[1]):
    while not ended.exists():
        logger.info("step")
        print("printed", flush=True)
        time.sleep(0.05)
print(f"stopped by {request.signal}")
"""


def start(folder: Path, stream: int, *arguments: str) -> subprocess.Popen:
    """With the terminal or pipe `stream` as its output, and as its controlling terminal if it is one."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    lead = lambda: os.isatty(1) and os.close(os.open(os.ttyname(1), os.O_RDWR))  # noqa: E731 - opened by a leader
    process = subprocess.Popen(
        command, cwd=folder, stdout=stream, stderr=stream, start_new_session=True, preexec_fn=lead
    )
    os.close(stream)
    return process


def end(process: subprocess.Popen, folder: Path) -> list[str]:
    """Let it write for a while after the loss, and end; what it wrote then."""
    kept = folder / "kept.log"
    while not kept.exists() or kept.read_text().count("printed") < 40:
        assert process.poll() is None
        time.sleep(0.05)
    (folder / "end").touch()
    assert process.wait() == 0, kept.read_text()
    return kept.read_text().splitlines()


@pytest.mark.parametrize(
    ("console", "signal"),
    [
        ("line", "SIGHUP"),
        pytest.param("full", "SIGHUP", marks=pytest.mark.slow),
        pytest.param("line", None, marks=pytest.mark.slow),
        pytest.param("full", None, marks=pytest.mark.slow),
    ],
)
def test_a_terminal_that_closes(tmp_path, console, signal):
    """It asks the program to end, but for `nohup`; status line and bars of a terminal do not fill the file."""
    ours, theirs = pty.openpty()
    process = start(tmp_path, theirs, console, *([] if signal else ["nohup"]))
    seen = b""
    while b"printed" not in seen or b"gen" not in seen:
        seen += os.read(ours, 4096)
    os.close(ours)
    lines = end(process, tmp_path)
    assert lines[-1].endswith(f"stopped by {signal}")
    assert sum("printed" in line for line in lines) > 5
    assert sum("step" in line and "/" not in line for line in lines) > 5
    assert any("SIGHUP" in line for line in lines) == (signal is not None)
    assert sum("gen" in line for line in lines) < len(lines) / 3, "soon nothing is drawn there"


def test_a_pipe_whose_reader_ends(tmp_path):
    ours, theirs = os.pipe()
    process = start(tmp_path, theirs, "line")
    assert os.read(ours, 4096)
    os.close(ours)
    lines = end(process, tmp_path)
    assert lines[-1] == "stopped by None"
    assert lines.count("printed") > 5


def test_a_signal_in_the_middle_of_the_loss_may_write_too(tmp_path):
    """The terminal closes, and its SIGHUP comes while the line that found it out is being written."""
    program = """
import os, signal
from verl.utils import logging_setup
logging_setup.survive_lost_terminal()
logging_setup.set_fallback_file("kept.log")
redirect = logging_setup._FallbackFile._redirect
logging_setup._FallbackFile._redirect = lambda *where: os.kill(os.getpid(), signal.SIGHUP) or redirect(*where)
signal.signal(signal.SIGHUP, lambda *_: (signal.signal(signal.SIGHUP, signal.SIG_IGN), print("asked", flush=True)))
os.read(0, 1)
print("first" * 9999, flush=True)
print("last")
"""
    ours, theirs = os.pipe()
    command = [sys.executable, "-c", program]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=buffered, stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    os.close(ours)
    _, problems = process.communicate(b"x")
    assert (process.returncode, problems.decode()) == (0, "")
    assert (tmp_path / "kept.log").read_text().split() == ["asked", "first" * 9999, "last"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_of_stderr_comes_at_once_and_of_stdout_where_python_does_not_buffer(unbuffered):
    program = (
        "import sys, time; from verl.utils.logging_setup import survive_lost_terminal; survive_lost_terminal();"
        "print('printed'); print('said', file=sys.stderr); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, env=environment)
    try:
        assert process.stderr.readline() == b"said\n"
        if unbuffered:
            assert process.stdout.readline() == b"printed\n"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
