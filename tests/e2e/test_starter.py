"""The project of `verl init` trains as documented in its README (outside the CI tier)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.commands import ROOT
from verl.cli.init import create_project


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1500)
def test_the_starter_project_learns_to_call_its_tool(tmp_path):
    create_project(tmp_path / "mine")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = ["bash", "mine/run.sh", "trainer.total_training_steps=20"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (tmp_path / "mine/metrics/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["data"] for line in lines]
    accuracy = [row["val/my_task/accuracy"] for row in rows if "val/my_task/accuracy" in row]
    calls = [row["tool_call_counts/mean"] for row in rows if "tool_call_counts/mean" in row]
    assert accuracy[0] < 0.2
    assert accuracy[-1] > 0.9
    assert calls[0] < 0.5
    assert calls[-1] > 0.9
    assert (tmp_path / "mine/checkpoints/global_step_20/actor/huggingface").is_dir()
