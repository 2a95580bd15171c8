"""The tables of benchmarks/startup.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from _startup_run import Measurement, logged_phases
from startup import cpu_rows, time_rows

LOG = """
start-up: Ray, 8 s so far
start-up: Ray 10.1 s
start-up: weights of RefPolicy 0.84 s
start-up: data 1 min 05 s
tokenised 8192 prompts in 0.4 s
"""


def test_phases_are_read_from_the_log():
    assert list(logged_phases(LOG)) == [("Ray", 10.1), ("weights of RefPolicy", 0.84), ("data", 65.0)]


def test_the_first_run_has_cold_caches_and_the_median_is_that_of_the_others():
    runs = [Measurement(step, 2 * step, {"Ray": step / 4}, {"driver": 1.0}) for step in (40.0, 20.0, 24.0, 16.0)]
    rows = {row["part"]: row for row in time_rows({"now": runs})}
    assert rows["Ray"] == {"part": "Ray", "now, cold": 10.0, "now, warm": 5.0}
    assert rows["to the end of step 1"] == {"part": "to the end of step 1", "now, cold": 40.0, "now, warm": 20.0}
    assert rows["to the end"]["now, cold"] == 80.0
    assert [row["now, warm"] for row in cpu_rows({"now": runs})] == pytest.approx([1.0, 1.0])
