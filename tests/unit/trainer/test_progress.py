"""Where a run stands, and the bar that shows it on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from verl.trainer.ppo.console import Console

PROGRAM = """
import time
from verl.trainer.ppo.console import Standing
from verl.trainer.progress import progress_bar
with progress_bar(lambda: Standing(3, 40, "rollout", 2.0)):
    time.sleep(1.3)
"""


def test_the_standing_names_step_and_phase_and_returns_to_the_outer_one():
    console = Console(total_steps=10, done_steps=2)
    with console.phase("step"):
        with console.phase("gen"):
            assert (console.standing().step, console.standing().phase) == (2, "rollout")
        assert console.standing().phase == "step"
        console.step_done()
    assert (console.standing().step, console.standing().total, console.standing().phase) == (3, 10, "")


def test_a_terminal_shows_a_bar_and_a_file_nothing():
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
    assert "3/40" in text.decode()
    assert "rollout 2 s" in text.decode()
