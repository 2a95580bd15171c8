"""Rows of files: nothing is converted, places are known, large files are mapped and not read."""

from __future__ import annotations

import json
import os
import re
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.dataset import rows as rows_module
from verl.utils.dataset.rows import Rows, open_data_file

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8), lambda v: st.lists(v, max_size=3)
)


@settings(max_examples=20)
@given(st.lists(st.dictionaries(st.text(min_size=1, max_size=4), _VALUES, max_size=4), min_size=1, max_size=6))
def test_json_rows_come_back_as_they_were_written(tmp_path_factory, written):
    folder = tmp_path_factory.mktemp("json")
    (folder / "a.jsonl").write_text("\n\n".join(json.dumps(row) for row in written))
    (folder / "b.json").write_text(json.dumps(written))
    for name in ("a.jsonl", "b.json"):
        part = open_data_file(str(folder / name))
        assert part.rows(0, len(part)) == written
        assert set(part.columns) == {key for row in written for key in row}


def test_dates_and_numbers_in_json_stay_what_they_are(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"ground_truth": "2024-01-01"}\n{"ground_truth": 7}\n')
    assert [row["ground_truth"] for row in open_data_file(str(tmp_path / "a.jsonl")).rows(0, 2)] == ["2024-01-01", 7]


def test_rows_of_several_files_are_numbered_through_and_know_their_place(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 0}\n\n{"x": 1}\n')
    pq.write_table(pa.table({"x": [2, 3]}), tmp_path / "b.parquet")
    rows = Rows([str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")])
    assert [rows[i]["x"] for i in range(len(rows))] == [0, 1, 2, 3]
    assert rows.where(1).endswith("a.jsonl line 3")
    assert rows.where(2).endswith("b.parquet row 0")
    assert [(first, [row["x"] for row in batch]) for first, batch in rows.batches(["x"], 1)] == [
        (0, [0]), (1, [1]), (2, [2]), (3, [3])
    ]  # fmt: skip


def test_a_large_parquet_file_is_mapped_from_one_copy_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "MAP_ABOVE_BYTES", 0)
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    rows = [{"x": i, "chat": [{"role": "user", "content": str(i)}]} for i in range(100)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=30)
    before = pa.total_allocated_bytes()
    part = open_data_file(str(tmp_path / "a.parquet"))
    assert part.rows(0, 100) == rows
    assert pa.total_allocated_bytes() - before < 1024
    open_data_file(str(tmp_path / "a.parquet"))
    assert len(list((tmp_path / "cache" / "datasets").glob("*.arrow"))) == 1


def _own_megabytes() -> float:
    """Memory that this process shares with no other, files apart."""
    total, anonymous = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                anonymous = line.split()[4] == "0"
            elif anonymous and line.startswith("Private_Dirty:"):
                total += int(line.split()[1])
    return total / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_a_forked_loader_worker_reads_every_row_without_a_copy_of_its_own(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(rows_module, "MAP_ABOVE_BYTES", 0)
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    written = [{"prompt": f"{i} " + "x" * 500} for i in range(20_000)]
    file = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(written), file)
    else:
        file.write_text(json.dumps(written) if suffix == "json" else "\n".join(map(json.dumps, written)))
    rows = Rows([str(file)])
    result, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = _own_megabytes()
        for number in range(0, len(rows), 2):
            rows[number]
        os.write(told, str(_own_megabytes() - before).encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert float(os.read(result, 100)) < 3  # of ten
