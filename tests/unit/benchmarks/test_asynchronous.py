"""The asynchronous benchmark counts what lies between two steps, and says of a profile what ran at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from _worker_profile import summarize_trace
from asynchronous import summarize_run, summary, time_to_accuracy, window


def test_the_first_and_the_last_steps_of_a_run_are_not_counted():
    assert window(steps=14, warm=4, ahead=2) == (3, 11)
    records = [{"time": 10.0 + 2 * n + 5 * (n < 4), "data": {"timing_s/gen": 1.0 * (n > 3)}} for n in range(14)]
    row = summarize_run(records, samples=256, warm=4, ahead=2)
    assert row["steps"] == 8
    assert row["samples/s"] == pytest.approx(256 * 8 / (32.0 - 21.0))
    assert row["wait s"] == 1.0
    assert "rollout idle" not in row


def test_modes_stand_beside_sync_of_the_same_shape():
    rows = [{"shape": s, "mode": m, "samples/s": v} for s, m, v in [("a", "sync", 2), ("a", "async", 3), ("b", "x", 5)]]
    assert [row["times sync"] for row in summary(rows)] == [1.0, 1.5, None]


def test_accuracy_by_the_clock():
    records = [
        {"time": 5.0 + t, "step": t, "data": {"val/two_step/accuracy": a}} for t, a in ((0, 0.1), (9, 0.6), (20, 0.7))
    ]
    assert time_to_accuracy(records) == {"s to 50%": 9.0, "s to 80%": None, "accuracy": 0.7, "steps": 20, "s": 20.0}


def test_a_profile_tells_what_streams_did_at_once():
    events = [
        {"cat": "kernel", "name": name, "ts": 1e6 * begin, "dur": 1e6 * seconds, "args": {"stream": stream}}
        for name, stream, begin, seconds in (
            ("update", 7, 0.0, 2.0),
            ("decode", 20, 1.0, 2.0),
            ("decode", 20, 4.0, 1.0),
        )
    ]
    found = summarize_trace([*events, {"cat": "cpu_op", "name": "x", "ts": 0, "dur": 1e9}], wall=6.0)
    assert (found["busy s"], found["several at once s"]) == (4.0, 1.0)
    assert [(stream["stream"], stream["s"]) for stream in found["streams"]] == [(20, 3.0), (7, 2.0)]
