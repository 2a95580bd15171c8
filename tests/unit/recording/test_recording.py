"""Writer and reader of recordings: budgets, redaction, attempts, crashes, versions, documentation."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.doc_scripts import load_script
from verl import recording
from verl.recording import schema
from verl.recording.redaction import Redaction
from verl.recording.writer import RecordWriter, delete_oldest, groups_within, step_to_drop

ROOT = Path(__file__).parents[3]


def open_writer(folder: Path, first_step: int = 0, run_id: str = "one", **settings: Any) -> RecordWriter:
    writer = RecordWriter(folder / "record", {"program": "ppo"}, first_step, run_id=run_id, **settings)
    writer.event("start" if first_step == 0 else "resume", max(0, first_step - 1), data={"first_step": first_step})
    return writer


def write_step(writer: RecordWriter, step: int, values: list[float], uids: list[str] | None = None) -> None:
    columns = {"step": [step] * len(values), "score": values, "uid": uids or [f"p{i}" for i in range(len(values))]}
    writer.submit(lambda: writer.write_table("trajectories", step, columns), step)
    finish(writer)


def finish(writer: RecordWriter) -> None:
    """Wait until everything is written, and raise its errors."""
    done = threading.Event()
    writer.submit(done.set, None)
    assert done.wait(30)
    writer.raise_error()


def log(writer: RecordWriter, step: int, **data: float) -> None:
    writer.line("metrics", {"step": step, "time": 1.0, "data": data})


# -------------------------------------------------------------------- contents


def test_rows_are_read_as_they_were_written(tmp_path):
    writer = open_writer(tmp_path)
    columns = {
        "step": [3, 3],
        "uid": ["a", "b"],
        "turns": [[{"source": "model", "tokens": 2, "text": "hé", "name": None, "reward": None}], []],
        "token_ids": [[1, 2], []],
        "rollout_log_probs": [[-0.1, float("nan")], []],
        "rewards": [{"acc": 1.0, "format": 0.5}, {}],
    }
    writer.submit(lambda: writer.write_table("trajectories", 3, columns, {"groups": 2}), 3)
    writer.close()
    run = recording.read(tmp_path)
    assert run.trajectories.steps == [3]
    assert run.trajectories.metadata(3) == {"attempt": 1, "schema": schema.VERSION, "groups": 2}
    first, second = run.trajectories.table(step=3).to_pylist()
    assert first["turns"] == columns["turns"][0]
    assert dict(first["rewards"]) == {"acc": 1.0, "format": 0.5}
    assert first["rollout_log_probs"][0] == np.float32(-0.1)
    assert np.isnan(first["rollout_log_probs"][1])
    assert second["token_ids"] == []
    assert second["advantages"] is None, "not written"
    assert run.trajectories.to_pandas(step=3, columns=["uid", "rewards"])["rewards"][0] == {"acc": 1.0, "format": 0.5}


def test_the_rows_of_a_prompt_are_found_in_any_row_group(tmp_path):
    writer = open_writer(tmp_path)
    uids = [f"p{number // 8}" for number in range(1000)]
    write_step(writer, 1, [float(number) for number in range(1000)], uids)
    writer.close()
    stream = recording.read(tmp_path).trajectories
    for uid in ("p0", "p15", "p16", "p124"):  # p15 ends the first row group of 128 rows
        rows = stream.table(step=1, uid=uid, columns=["score", "uid"]).to_pylist()
        assert rows == [{"score": float(i), "uid": uid} for i in range(1000) if uids[i] == uid]
    assert len(stream.table(step=1, uid="unknown")) == 0


def test_metrics_are_a_column_each_and_not_finite_numbers_survive(tmp_path):
    writer = open_writer(tmp_path)
    log(writer, 1, loss=0.5)
    log(writer, 2, loss=float("inf"), kl=-1.0)
    writer.close()
    table = recording.read(tmp_path).metrics.table()
    assert table.column_names == ["step", "time", "attempt", "loss", "kl"]
    assert table["loss"].to_pylist() == [0.5, float("inf")]
    assert table["kl"].to_pylist() == [None, -1.0]


def test_a_reader_follows_a_run_that_is_writing(tmp_path):
    writer = open_writer(tmp_path)
    run = recording.read(tmp_path)
    assert run.metrics.table()["step"].to_pylist() == []
    for step in (1, 2, 3):
        log(writer, step, loss=0.0)
        writer.line("phases", {"step": step, "track": "controller", "phase": "gen", "start": 1.0, "end": 2.0})
        finish(writer)
        assert run.metrics.table()["step"].to_pylist() == list(range(1, step + 1))
        assert run.phases.table(["step", "track"])["step"].to_pylist() == list(range(1, step + 1))
    writer.close()


# -------------------------------------------------------------------- attempts and crashes


def test_a_resumed_run_supersedes_repeated_steps_only(tmp_path):
    writer = open_writer(tmp_path)
    for step in (1, 2, 3, 4):
        log(writer, step, loss=float(step))
        write_step(writer, step, [float(step)])
    writer.close()
    writer = open_writer(tmp_path, first_step=3, run_id="another command")
    log(writer, 2, accuracy=0.75)  # validation before training, of the step that was loaded
    log(writer, 3, loss=-3.0)
    write_step(writer, 3, [-3.0])
    writer.close()
    run = recording.read(tmp_path)
    assert [(a.number, a.first_step) for a in run.attempts] == [(1, 0), (2, 3)]
    table = run.metrics.table()
    assert table["step"].to_pylist() == [1, 2, 3]
    assert table["loss"].to_pylist() == [1.0, 2.0, -3.0]
    assert table["accuracy"].to_pylist() == [None, 0.75, None]
    assert run.trajectories.steps == [1, 2, 3], "step 4 is of the first attempt"
    assert run.trajectories.table(["score"])["score"].to_pylist() == [1.0, 2.0, -3.0]
    moved = [pq.read_table(path)["score"][0].as_py() for path in sorted(run.folder.glob("superseded/2/*/*.parquet"))]
    assert moved == [3.0, 4.0], "nothing is deleted"


def test_rows_of_superseded_attempts_are_left_out_of_a_table(tmp_path):
    for first_step in (0, 3):
        writer = open_writer(tmp_path, first_step)
        for step in range(first_step, 5):
            writer.line("phases", {"step": step, "track": "controller", "phase": "gen", "start": 1.0, "end": 2.0})
        writer.close()
    run = recording.read(tmp_path)
    phases = run.without_superseded(run.phases.table())
    assert list(zip(phases["step"].to_pylist(), phases["attempt"].to_pylist(), strict=True)) == [
        (0, 1), (1, 1), (2, 1), (3, 2), (4, 2),
    ]  # fmt: skip


def test_a_reader_notices_a_new_recording_in_the_same_folder(tmp_path):
    writer = open_writer(tmp_path, run_id="one")
    for step in range(5):
        log(writer, step, loss=1.0)
    writer.close()
    run = recording.read(tmp_path)
    assert len(run.metrics.table()) == len(run.metrics.names) * 5 == 5
    writer = open_writer(tmp_path, run_id="two")
    for step in range(9):
        log(writer, step, other=2.0)
    writer.close()
    assert run.metrics.table()["other"].to_pylist() == [2.0] * 9
    assert run.metrics.names == ["other"]
    assert len(run.events.table()) == 1


def test_a_restart_from_the_beginning_continues_the_recording_and_another_command_moves_it(tmp_path):
    open_writer(tmp_path, run_id="one").close()
    writer = open_writer(tmp_path, run_id="one")
    assert writer.attempt == 2
    writer.close()
    writer = open_writer(tmp_path, run_id="two")
    assert writer.attempt == 1
    writer.close()
    (aside,) = tmp_path.glob("record_before_*")
    assert len(recording.read(aside).attempts) == 2


def test_recordings_of_earlier_runs_count_towards_the_budget_and_are_deleted_first(tmp_path):
    limit = 35_000
    for number in range(5):
        writer = open_writer(tmp_path, run_id=str(number), max_bytes=limit)
        writer.event("warning", 1, "x" * 10_000)
        writer.close()
        writer.raise_error()
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.*") if file.is_file()) <= limit
    kept = [tmp_path / "record", *tmp_path.glob("record_before_*")]
    assert {json.loads((folder / "run.json").read_text())["run_id"] for folder in kept} == {"2", "3", "4"}
    writer = open_writer(tmp_path, first_step=2, run_id="4", max_bytes=limit)
    writer.event("warning", 2, "x" * 20_000)
    writer.close()
    assert list(tmp_path.glob("record_before_*")) == [], "also the newest one"
    assert len(recording.read(tmp_path).attempts) == 2


def test_the_newest_and_active_folders_are_never_deleted(tmp_path):
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 100)
        os.utime(folder / "file", (number, number))
    assert [folder.name for folder in delete_oldest(tmp_path.iterdir(), 50)] == ["1", "0"]
    (tmp_path / "active").mkdir()
    (tmp_path / "active/file").write_bytes(b"x" * 100)
    (tmp_path / "newest").mkdir()
    (tmp_path / "newest/file").write_bytes(b"x" * 100)
    assert [folder.name for folder in delete_oldest(tmp_path.iterdir(), 50)] == ["2"]


def test_folders_that_another_run_deletes_meanwhile_are_left_out(tmp_path):
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "file").write_bytes(b"x" * 100)
        os.utime(tmp_path / str(number) / "file", (number, number))
    (tmp_path / "0/gone").symlink_to(tmp_path / "missing")
    folders = [tmp_path / "0", tmp_path / "deleted", tmp_path / "1"]
    assert [folder.name for folder in delete_oldest(folders, 50)] == ["0"]


def test_dropped_records_are_counted_in_an_event(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.recording.writer.MAX_LINES", 10)
    writer = open_writer(tmp_path)
    blocked = threading.Event()
    finish(writer)
    writer.submit(lambda: blocked.wait(30) and None, None)
    for step in range(1, 26):
        log(writer, step, loss=0.5)
    blocked.set()
    writer.close()
    run = recording.read(tmp_path)
    (event,) = [event for event in run.events.table().to_pylist() if event["kind"] == "dropped_records"]
    assert json.loads(event["data"]) == {"metrics": 15}
    assert event["step"] == 25
    assert len(run.metrics.table()) == 10


def test_a_truncated_last_record_is_ignored_and_the_next_attempt_appends_after_it(tmp_path):
    writer = open_writer(tmp_path)
    for step in (1, 2):
        log(writer, step, loss=0.5)
        writer.line("phases", {"step": step, "track": "controller", "phase": "gen", "start": 1.0, "end": 2.0})
    writer.close()
    for name in ("metrics", "phases", "events"):
        path = tmp_path / f"record/{name}.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole + whole.splitlines()[-1][:20])
    assert recording.read(tmp_path).metrics.table()["step"].to_pylist() == [1, 2]
    writer = open_writer(tmp_path, first_step=3)
    log(writer, 3, loss=0.5)
    writer.line("phases", {"step": 3, "track": "controller", "phase": "gen", "start": 1.0, "end": 2.0})
    writer.close()
    run = recording.read(tmp_path)
    assert run.metrics.table()["step"].to_pylist() == [1, 2, 3]
    assert run.phases.table()["step"].to_pylist() == [1, 2, 3]
    assert [attempt.number for attempt in run.attempts] == [1, 2]


def test_a_killed_writer_leaves_no_partial_step(tmp_path):
    """A file appears under its name only when it is complete; what a killed process leaves is not read."""
    writer = open_writer(tmp_path)
    write_step(writer, 1, [1.0])
    folder = tmp_path / "record/trajectories"
    (folder / ".00000002.parquet.abc.partial").write_bytes(b"PAR1")
    writer.close()
    assert recording.read(tmp_path).trajectories.steps == [1]


def test_errors_of_the_disk_are_raised_later_and_do_not_stop_the_writer(tmp_path):
    writer = open_writer(tmp_path)
    (tmp_path / "record/trajectories").write_text("a file where the folder should be")
    writer.submit(lambda: writer.write_table("trajectories", 1, {"step": [1]}), 1)
    log(writer, 1, loss=1.0)
    writer.close()
    with pytest.raises(OSError, match="trajectories"):
        writer.raise_error()
    writer.raise_error()
    assert len(recording.read(tmp_path).metrics.table()) == 1


def test_a_stored_error_keeps_no_batch_in_memory(tmp_path):
    class Batch:
        pass

    def fail(batch: Batch) -> None:
        raise OSError("disk full") from ValueError("cause")

    writer = open_writer(tmp_path)
    batches = []
    for _ in range(5):
        batch = Batch()
        batches.append(weakref.ref(batch))
        writer.submit(functools.partial(fail, batch), 1)
        del batch
        with contextlib.suppress(OSError):
            finish(writer)
    assert [batch() for batch in batches] == [None] * 5
    writer.close()


def test_records_of_other_threads_after_the_end_of_the_run_are_no_error(tmp_path):
    writer = open_writer(tmp_path)
    log(writer, 1, loss=1.0)
    writer.close()
    log(writer, 2, loss=2.0)
    writer.event("warning", 2)
    writer.close()
    assert recording.read(tmp_path).metrics.table()["step"].to_pylist() == [1]


def test_the_newest_steps_are_recorded_if_the_writer_falls_behind(tmp_path):
    writer = open_writer(tmp_path)
    started, release, calls = threading.Event(), threading.Event(), []
    writer.submit(lambda: started.set() or (release.wait(30) and None), None)
    assert started.wait(30)
    writer.submit(lambda: calls.append("vocabulary"), None)
    for step in range(1, 6):
        writer.submit(functools.partial(calls.append, step), step)
    release.set()
    writer.close()
    assert calls == ["vocabulary", 4, 5], "two steps wait, so memory is bounded"
    events = recording.read(tmp_path).events.table().to_pylist()
    assert [event["step"] for event in events if event["kind"] == "skipped"] == [1, 2, 3]


# -------------------------------------------------------------------- budgets


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(0, 2000), st.integers(0, 10))
def test_groups_fit_into_the_budget_and_none_is_left_out_without_need(sizes, budget, seed):
    chosen = groups_within(sizes, budget, seed)
    assert chosen == sorted(set(chosen))
    assert sum(sizes[i] for i in chosen) <= budget
    if sum(sizes) <= budget:
        assert chosen == list(range(len(sizes)))
    assert chosen == groups_within(sizes, budget, seed), "reproducible"


def test_groups_are_sampled_uniformly():
    counts = np.zeros(10)
    for seed in range(2000):
        counts[groups_within([10] * 10, 30, seed)] += 1
    assert counts.sum() == 3 * 2000
    # Standard deviation of a count: sqrt(2000 × 0.3 × 0.7) = 20.5.
    assert np.abs(counts - 600).max() < 5 * 20.5


def test_removed_steps_leave_evenly_spaced_ones():
    steps = list(range(1, 18))
    while len(steps) > 5:
        step = step_to_drop(steps)
        assert step is not None
        steps.remove(step)
    assert steps[0] == 1
    assert steps[-1] == 17
    assert max(np.diff(steps)) <= 2 * min(np.diff(steps))
    assert step_to_drop([1, 17]) is None


def test_the_recording_stays_within_its_budget_and_names_what_was_deleted(tmp_path):
    noise = np.random.default_rng(0)
    writer = open_writer(tmp_path, max_bytes=200_000)
    for step in range(1, 31):
        values = pa.array([noise.standard_normal(4000).astype(np.float32)], pa.list_(pa.float32()))
        columns = {"step": [step], "uid": ["a"], "advantages": values}
        writer.submit(lambda step=step, columns=columns: writer.write_table("trajectories", step, columns), step)
        finish(writer)
        assert sum(file.stat().st_size for file in (tmp_path / "record").rglob("*.*")) < 205_000
    writer.close()
    run = recording.read(tmp_path)
    kept = run.trajectories.steps
    assert 4 < len(kept) < 16
    assert kept[0] == 1
    assert kept[-1] == 30
    events = [json.loads(e["data"]) for e in run.events.table().to_pylist() if e["kind"] == "deleted_steps"]
    dropped = [step for event in events for step in event["steps"]]
    assert sorted(dropped + kept) == list(range(1, 31))


def test_only_metrics_and_events_are_recorded_if_small_streams_alone_exceed_the_budget(tmp_path):
    writer = open_writer(tmp_path, max_bytes=20_000)
    write_step(writer, 0, [1.0])
    for step in range(200):
        log(writer, step, loss=0.5)
        writer.line("phases", {"step": step, "track": "controller", "phase": "gen", "start": 1.0, "end": 2.0})
        finish(writer)
    write_step(writer, 1, [1.0])
    writer.close()
    run = recording.read(tmp_path)
    assert run.events.table()["kind"].to_pylist() == ["start", "deleted_steps", "stopped"]
    assert run.events.table()["step"].to_pylist()[-1] > 0
    assert len(run.metrics.table()) == 200
    assert 0 < len(run.phases.table()) < 200
    assert run.trajectories.steps == []


def test_the_oldest_superseded_steps_are_deleted_before_others(tmp_path):
    values = pa.array([np.random.default_rng(0).standard_normal(4000).astype(np.float32)], pa.list_(pa.float32()))
    for first_step in (0, 1):
        writer = open_writer(tmp_path, first_step, max_bytes=75_000)
        for step in (1, 2):
            columns = {"step": [step], "uid": ["a"], "advantages": values}
            writer.submit(functools.partial(writer.write_table, "trajectories", step, columns), step)
            finish(writer)
        writer.close()
    run = recording.read(tmp_path)
    assert run.trajectories.steps == [1, 2]
    left = [schema.step_of_file(path.name) for path in run.folder.glob("superseded/*/*/*")]
    assert left == [2]  # the budget is kept without the older one


# -------------------------------------------------------------------- redaction


def test_matches_are_replaced_in_every_text_of_a_record(tmp_path):
    redact = Redaction([r"sk-\w+", "(?i)secret"])
    writer = open_writer(tmp_path, redaction=redact)
    writer.event("warning", 1, "key sk-abc123 of a SECRET", {"nested": [{"sk-1": "Secret"}]})
    writer.close()
    event = recording.read(tmp_path).events.table().to_pylist()[-1]
    assert event["message"] == "key [redacted] of a [redacted]"
    assert json.loads(event["data"]) == {"nested": [{"sk-1": "[redacted]"}]}, "fields keep their names"
    assert redact.value({"sk-1": "Secret"}, keys=True) == {"[redacted]": "[redacted]"}


def test_a_pattern_that_matches_names_and_numbers_leaves_a_readable_recording(tmp_path):
    writer = open_writer(tmp_path, redaction=Redaction([r"\w{4,}", r"\d+"]))
    log(writer, 1, first_metric=0.5, second_metric=1.5)
    writer.event("checkpoint", 1, data={"seconds": 123456, "path": "folder"})
    writer.close()
    run = recording.read(tmp_path)
    assert [attempt.first_step for attempt in run.attempts] == [0]
    assert run.metrics.table(["first_metric", "second_metric"]).to_pylist() == [
        {"first_metric": 0.5, "second_metric": 1.5}
    ]
    data = json.loads(run.events.table().to_pylist()[-1]["data"])
    assert data == {"seconds": 123456, "path": "[redacted]"}


# -------------------------------------------------------------------- folders and versions


def test_other_folders_are_rejected_in_one_sentence(tmp_path):
    for folder, why in ((tmp_path, rf"{tmp_path} .*record/run\.json"), (tmp_path / "missing", "missing .*folder")):
        with pytest.raises(recording.RecordingError, match=why):
            recording.read(folder)
    (tmp_path / "run.json").write_text("not json")
    with pytest.raises(recording.RecordingError, match=r"run\.json\b.*JSON"):
        recording.read(tmp_path)


def test_an_empty_recording_has_empty_tables(tmp_path):
    RecordWriter(tmp_path / "record", {}).close()
    run = recording.read(tmp_path)
    for name, stream in run.streams.items():
        table = stream.table()
        assert len(table) == 0, name
        assert name == "metrics" or table.schema == schema.arrow_schema(name)


def test_a_newer_version_is_rejected_and_unknown_fields_are_ignored(tmp_path):
    writer = open_writer(tmp_path)
    writer.line(
        "phases", {"step": 1, "track": "engine/0", "phase": "x", "start": 0.0, "end": 1.0, "new": [1, {"a": 2}]}
    )
    writer.close()
    (tmp_path / "record/new_stream.jsonl").write_text("{}\n")
    assert recording.read(tmp_path).phases.table()["track"].to_pylist() == ["engine/0"]
    file = tmp_path / "record/run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema": schema.VERSION + 1}))
    with pytest.raises(recording.RecordingError, match=r"schema 3\b.*\b2\b"):
        recording.read(tmp_path)


def test_fields_of_the_first_version_have_their_new_names(tmp_path):
    writer = open_writer(tmp_path)
    text = 'a text with "lane": inside'
    writer.line("phases", {"step": 1, "lane": "engine/0", "phase": text, "start": 0.0, "end": 1.0})
    writer.close()
    folder = tmp_path / "record/validation"
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"step": [3], "uid": ["a"], "answer": ["yes"]}), folder / "00000003.parquet")
    file = tmp_path / "record/run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema": 1}))
    run = recording.read(tmp_path)
    assert run.phases.table(["track", "phase"]).to_pylist() == [{"track": "engine/0", "phase": text}]
    for selection in ({}, {"uid": "a"}):
        rows = run.validation.table(["step", "response", "score"], step=3, **selection).to_pylist()
        assert rows == [{"step": 3, "response": "yes", "score": None}]


def test_a_damaged_step_is_named(tmp_path):
    writer = open_writer(tmp_path)
    write_step(writer, 1, [1.0])
    writer.close()
    file = tmp_path / "record/trajectories/00000001.parquet"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(recording.RecordingError, match=r"00000001\.parquet"):
        recording.read(tmp_path).trajectories.table(step=1)


def test_the_page_of_fields_is_current():
    page = (ROOT / "docs/reference/recording.md").read_text()
    assert page == load_script("recording_page.py").render(), (
        "run: python docs/scripts/recording_page.py > docs/reference/recording.md"
    )


def test_every_field_has_one_line_of_meaning():
    for stream in schema.STREAMS.values():
        for field in stream.fields:
            assert field.meaning, field.name
            assert "\n" not in field.meaning
            assert "|" not in field.meaning, "would break the table"
