"""The asynchronous benchmark counts what lies between two steps, and says of a profile what ran at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from _async_runs import medians, step_rows
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


def _records(seconds: list[float]) -> list[dict]:
    ends = [100.0 + sum(seconds[: n + 1]) for n in range(len(seconds))]
    data = {"response_length/mean": 10.0, "timing_s/update_actor": 0.5, "memory_gb/gen": 3.0}
    return [{"time": end, "data": data} for end in ends]


def test_measured_steps_of_an_interleaved_run_follow_its_warm_up():
    row = step_rows(_records([30.0, 9.0, 2.0, 4.0, 3.0, 50.0]), samples=8, warm=2, measured=3)
    assert row["step s"] == [2.0, 4.0, 3.0]
    assert (row["median s"], row["mean s"], row["samples/s"]) == (3.0, 3.0, 8 * 3 / 9.0)
    assert row["tokens/s"] == pytest.approx(8 * 30 / 9.0)
    assert (row["update s"], row["peak GB"]) == (0.5, 3.0)
    assert step_rows(_records([30.0, 9.0, 2.0]), samples=8, warm=2, measured=3) == {
        "note": "3 of at least 5 steps ended"
    }


def _run(mode: str, number: int, seconds: list[float], more: tuple[str, ...] = ()) -> dict:
    row = {"case": "equal", "shape": "tiny", "mode": mode, "round": number, "more": list(more)}
    return row | {"step s": seconds, "samples/s": 1.0, "tokens/s": 10.0}


def test_interleaved_runs_are_compared_by_the_median_of_all_their_steps():
    rows = [_run("sync", 0, [9.0]), _run("sync", 0, [1.0, 2.0]), _run("sync", 1, [3.0, 8.0])]
    rows += [_run("async", 0, [2.0]), _run("async", 1, [3.0]), _run("async", 0, [5.0], ("key=1",))]
    rows.append({**_run("async", 2, []), "note": "failed"})
    del rows[-1]["step s"]
    table = medians(rows)
    assert [(line["mode"], line["rounds"], line["steps"], line["median s"]) for line in table] == [
        ("sync", 2, 4, 2.5),
        ("async", 2, 2, 2.5),
        ("async", 1, 1, 5.0),
    ]
    assert [(line.get("met"), line["× sync"]) for line in table] == [(None, 1.0), (True, 1.0), (False, 0.5)]
