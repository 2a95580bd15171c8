"""The regression table compares entries of one machine, and knows which direction is better."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from regression import FILE, compare, new_entry, read_entries


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


def test_the_stored_table_is_readable():
    for stored in read_entries(FILE):
        assert set(stored) == {"commit", "changed_files", "date", "machine", "versions", "runs", "values"}
        assert all(value > 0 for value in stored["values"].values())
