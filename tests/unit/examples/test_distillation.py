"""examples/distillation, as a user starts it: the student comes nearer to its teacher."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_the_student_comes_nearer_to_its_teacher(tmp_path):
    command = [sys.executable, str(ROOT / "examples/distillation/distill.py"), "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--steps", "60"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    apart = dict(re.findall(r"^  (before|SFT|reverse_kl_topk) +KL to the teacher ([\d.]+)", done.stdout, re.MULTILINE))
    assert float(apart["reverse_kl_topk"]) < 0.7 * float(apart["before"]), done.stdout[-2000:]
