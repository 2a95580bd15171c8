"""A run recovers from killed and stopped processes with the weights of an uninterrupted run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.timeout(3000)
def test_six_faults_cost_no_saved_step_no_prompt_and_no_bit(tmp_path):
    """The rollout has a pool of its own, where it is started anew without the trainer.

    Each fault must be over within the command's own limit; how long all of them take together is no promise.
    """
    kinds = ["replica", "scorer", "saver", "controller", "GCS"]
    command = [sys.executable, str(CHAOS), "--faults=6", "--layouts=separate", "--hang-timeout=10", f"--out={tmp_path}"]
    done = subprocess.run([*command, "--kinds", *kinds], capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    faults = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert len(faults) == 6
    assert {fault["reaction"] for fault in faults} >= {"restarted", "continued"}
