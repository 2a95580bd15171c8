"""The tour: PPO learns from a trained reward model, and the served model gives the learned responses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_the_tour_from_random_weights_to_a_served_model(tmp_path):
    command = [sys.executable, "examples/tour/run.py", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    accuracy = re.search(r"accuracy of the reward model on new pairs: (\d+)%", done.stdout)
    assert int(accuracy[1]) > 90
    rewards = re.search(r"reward (\S+) .*PPO, (\S+) after", done.stdout)
    assert float(rewards[2]) > float(rewards[1])
    before, after = re.search(r"accuracy (\d+)% before PPO, (\d+)% after", done.stdout).groups()
    assert int(before) < 50
    assert int(after) > 75
    answers = re.findall(r"#### (\d+) +\(correct: (\d+)\)", done.stdout)
    assert len(answers) == 3
    assert sum(answer == correct for answer, correct in answers) >= 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
