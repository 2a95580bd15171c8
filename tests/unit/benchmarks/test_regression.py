"""The regression table compares entries of one machine, and knows which direction is better."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from regression import FILE, BothCases, case_values, compare, new_entry, read_entries
from training_step import work_of


def entry(machine: str, commit: str, **values: float) -> dict:
    return {"machine": machine, "commit": commit, "values": values}


STEP, DECODE = "(a) step, s", "decode, tokens/s"


@pytest.mark.parametrize(
    ("step", "decode", "worse"),
    [(2.0, 100.0, []), (2.05, 98.0, []), (2.1, 120.0, [STEP]), (1.0, 90.0, [DECODE])],
)
def test_worse_is_slower_or_fewer_tokens_by_more_than_3_percent(step, decode, worse):
    before = [entry("h200", "old", **{STEP: 9.0, DECODE: 1.0}), entry("h200", "new", **{STEP: 2.0, DECODE: 100.0})]
    rows = compare(entry("h200", "now", **{STEP: step, DECODE: decode}), [*before, entry("cpu", "x", **{STEP: 50.0})])
    assert [row["value"] for row in rows if row["worse"]] == worse
    assert rows[0]["new"] == 2.0


def test_without_an_entry_of_the_machine_nothing_is_compared():
    (row,) = compare(entry("h200", "now", **{STEP: 1.0}), [entry("cpu", "x", **{STEP: 50.0})])
    assert row == {"value": STEP, "now": 1.0}


def test_an_entry_says_what_it_depends_on(tmp_path):
    file = tmp_path / "table.jsonl"
    assert read_entries(file) == []
    stored = new_entry({STEP: 1.23456789}, runs=2)
    file.write_text(json.dumps(stored) + "\n")
    assert read_entries(file) == [stored]
    assert stored["values"] == {STEP: 1.23457}
    assert stored["runs"] == 2
    assert stored["machine"]
    assert stored["versions"]["torch"]


def test_both_cases_are_measured_in_one_run():
    equal, ragged = (work_of(case, "tiny", 3, small=True) for case in "ab")
    both = BothCases(**{**asdict(ragged), "steps": 6})
    for step in range(3):
        assert (both.lengths(step) == equal.lengths(step)).all()
        assert (both.lengths(3 + step) == ragged.lengths(step)).all()


def test_values_of_a_case_are_means_and_the_highest_peak():
    phases = {"timing_s/gen": 1.0, "timing_s/update_actor": 2.0}
    steps = [{**phases, "timing_s/step": 4.0, "memory_gb/gen": 7.0}, {**phases, "timing_s/step": 5.0}]
    expected = {"(b) gen, s": 1.0, "(b) update_actor, s": 2.0, "(b) step, s": 4.5}
    assert case_values("b", steps) == {**expected, "(b) peak, GB": 7.0}
    assert case_values("b", steps[1:]) == {**expected, "(b) step, s": 5.0}


def test_the_stored_table_is_readable():
    for stored in read_entries(FILE):
        assert set(stored) == {"commit", "changed_files", "date", "machine", "versions", "runs", "values"}
        assert all(value > 0 for value in stored["values"].values())
