"""Sources of the recording: spans and usage of ranks, events from metrics and logs, restarts by the supervisor."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl import recording
from verl.config import ConfigError, load_config
from verl.config.devices import DeviceUsage
from verl.planning.phases import GB, DeviceMemory, MemoryPlan, PhaseMemory
from verl.recording.writer import RecordWriter
from verl.single_controller.base.worker import RankUsage
from verl.trainer.common.recorder import RankPoll, WarningHandler, events_of, increase, planned_memory
from verl.trainer.common.run_status import RunStatus
from verl.trainer.recovery.supervisor import record_restart
from verl.utils import progress
from verl.utils.checkpoint.folders import move_aside
from verl.utils.progress import GENERATING, BusySpans, Span, span, take_spans
from verl.workers.rollout.base import Load


def writer_of(folder: Path) -> RecordWriter:
    writer = RecordWriter(folder / "record", {})
    writer.event("start", 0, data={"first_step": 0})
    return writer


# -------------------------------------------------------------------- spans


def test_spans_are_taken_once_and_count_is_bounded():
    take_spans()
    with span("update"), span("inner"):
        pass
    assert [entry.name for entry in take_spans()] == ["inner", "update"]
    assert take_spans() == []
    for _ in range(progress.MAX_SPANS + 5):
        with span("call"):
            pass
    assert len(take_spans()) == progress.MAX_SPANS


def test_a_busy_span_lasts_from_the_first_to_the_last_request(monkeypatch):
    clock = iter([10.0, 11.0, 12.0, 15.0, 20.0, 20.0 + 2 * progress.MAX_BUSY_S, 90.0])
    monkeypatch.setattr(progress.time, "time", lambda: next(clock))
    busy = BusySpans("generating")
    take_spans()
    for count in (2, 1, 0):
        busy.set(count)
    assert take_spans() == [Span("generating", 10.0, 12.0)]
    busy.set(0)
    assert take_spans() == []
    busy.set(3)
    busy.set(2)  # long after: reported in parts
    busy.set(0)
    middle = 20.0 + 2 * progress.MAX_BUSY_S
    assert take_spans() == [Span("generating", 20.0, middle), Span("generating", middle, 90.0)]


# -------------------------------------------------------------------- ranks


class Group:
    """Replies of two ranks: rank 0 leads an engine; both use one GPU; rank 1 of the second query does not reply."""

    rank_usage: Any = None

    def __init__(self, colocated: bool = False) -> None:
        self.queries, self._colocated = 0, colocated

    def query_ranks(self, method: str, timeout: float) -> list[Any]:
        assert method == "rank_usage"
        self.queries += 1
        device = DeviceUsage("GPU-1", "H200", 5 * 10**9, 141 * 10**9, 0.5, 400.0)
        load = Load(
            requests_running=3,
            requests_waiting=1,
            generated_tokens_total=1000 * self.queries,
            preemptions_total=2 * self.queries,
            weight_version=7,
        )
        if self._colocated:  # another role of the same processes: its spans were taken already
            return [RankUsage("node", 100 + rank, [], device, 0) for rank in (0, 1)]
        now = time.time()
        calls = [Span("update_actor", now - 2, now - 1), Span(GENERATING, now - 4, now - 3)]
        first = RankUsage("node", 100, calls, device, 10**9, load)
        return [first, RankUsage("node", 101, [], device, 2 * 10**9) if self.queries == 1 else None]


def test_ranks_engines_and_devices_get_their_records(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.trainer.common.recorder.MIN_POLL_S", 0.0)
    writer, actor, critic = writer_of(tmp_path), Group(), Group(colocated=True)
    poll = RankPoll(lambda: {"actor_rollout": actor, "critic": critic, "mine": SimpleNamespace()}, writer, step=4)
    poll.step_ended(5)
    while actor.queries < 1:
        time.sleep(0.01)
    poll.close(poll=True)
    writer.close()
    run = recording.read(tmp_path)
    tracks = {(row["track"], row["phase"], row["step"]) for row in run.phases.table().to_pylist()}
    assert {("actor_rollout/0", "update_actor", 5), ("engine/0", "generating", 5)} <= tracks
    assert {track for track, _, _ in tracks} == {"actor_rollout/0", "engine/0"}
    (engine,) = run.engines.table().to_pylist()
    assert (engine["engine"], engine["running"], engine["waiting"], engine["weight_version"]) == ("engine/0", 3, 1, 7)
    (device,) = run.devices.table().to_pylist()
    assert (device["device"], device["power"], device["utilization"]) == ("GPU-1", 400.0, 0.5)
    assert "actor_rollout/0" in device["tracks"]
    assert not any("critic" in track for track in device["tracks"]), "one track per process"


def test_calls_of_a_step_that_ends_during_a_query_belong_to_this_step(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.trainer.common.recorder.MIN_POLL_S", 0.0)
    monkeypatch.setattr("verl.trainer.common.recorder.MIN_INTERVAL_S", 0.01)
    start = time.time()

    class EndsDuringQuery:
        """The step ends within the first query; its last call is in the reply to the second one."""

        rank_usage: Any = None
        queries = 0

        def query_ranks(self, method: str, timeout: float) -> list[Any]:
            self.queries += 1
            if self.queries == 1:
                poll.step_ended(1)
            calls = [Span("update_actor", start - 1, start)] if self.queries == 2 else []
            return [RankUsage("node", 100, calls, None, 0)]

    writer, actor = writer_of(tmp_path), EndsDuringQuery()
    poll = RankPoll(lambda: {"actor": actor}, writer, step=0)
    while actor.queries < 3:
        time.sleep(0.01)
    poll.close(poll=False)
    writer.close()
    assert [row["step"] for row in recording.read(tmp_path).phases.table().to_pylist()] == [1]


def test_a_poll_that_is_closed_during_a_query_collects_the_last_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.trainer.common.recorder.MIN_POLL_S", 0.0)
    querying, closing = threading.Event(), threading.Event()

    class SlowGroup:
        rank_usage: Any = None
        queries = 0

        def query_ranks(self, method: str, timeout: float) -> list[Any]:
            self.queries += 1
            querying.set()
            closing.wait(10)
            calls = [Span("update_actor", time.time() - 1, time.time())] if self.queries == 2 else []
            return [RankUsage("node", 100, calls, None, 0)]

    writer = writer_of(tmp_path)
    group = SlowGroup()
    poll = RankPoll(lambda: {"actor": group}, writer, step=0)
    poll.step_ended(1)
    querying.wait(10)
    threading.Timer(0.2, closing.set).start()
    poll.close(poll=True)
    writer.close()
    assert len(recording.read(tmp_path).phases.table()) == 1


def test_a_poll_that_fails_repeatedly_is_logged_once_and_ends(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("verl.trainer.common.recorder.MIN_POLL_S", 0.0)
    monkeypatch.setattr("verl.trainer.common.recorder.MIN_INTERVAL_S", 0.01)
    failing = SimpleNamespace(rank_usage=None)  # has no query_ranks
    writer = writer_of(tmp_path)
    with caplog.at_level(logging.WARNING, logger="verl"):
        poll = RankPoll(lambda: {"actor": failing}, writer, step=0)
        poll.step_ended(1)
        while not caplog.records:
            time.sleep(0.01)
        poll.step_ended(2)
        poll.close(poll=True)
    writer.close()
    assert len(caplog.records) == 1


# -------------------------------------------------------------------- events


def test_events_follow_from_the_metrics_of_a_step():
    metrics = {"async/dropped/finished": 2.0, "async/dropped/in_flight": 0.0, "async/rejected": 1.0, "loss": 1.0}
    metrics |= {"reward/errors": 3.0, "reward/errors/timeout": 3.0, "reward/errors/raised": 0.0}
    metrics |= {"training/failed_saves": 2.0, "training/failed_dumps": 4.0}
    assert events_of(metrics, {"training/failed_dumps": 4.0, "training/failed_saves": 1.0}) == {
        "dropped_groups": {"async/dropped/finished": 2.0, "async/rejected": 1.0},
        "failed_rewards": {"timeout": 3.0},
        "failed": {"saves": 1.0},
    }
    assert events_of({"loss": 1.0}, {}) == {}
    filtered = {"filter_groups/dropped_groups": 5.0}
    assert events_of(filtered, {}) == {"dropped_groups": filtered}
    assert events_of({**filtered, "async/rejected": 6.0}, {}) == {"dropped_groups": {"async/rejected": 6.0}}


def test_the_planned_memory_is_comparable_with_the_measured_one():
    parts = {"weights": 2.0 * GB, "kv_cache": 3.0 * GB, "context": 0.5 * GB}
    phases = (PhaseMemory("gen", "pool", parts), PhaseMemory("save", "pool", {"processes": GB}))
    plan = MemoryPlan(phases, DeviceMemory("cuda", 80 * GB, "h100"))
    assert planned_memory(plan) == {"gb": {"gen": 5.0}, "device_gb": 80.0}


def test_increases_of_counters_are_unknown_after_a_restart():
    assert (increase(2, 5), increase(5, 2), increase(None, 2), increase(2, None)) == (3, None, None, None)


@pytest.mark.parametrize("texts", [True, False])
def test_warnings_of_the_log_are_events_and_their_number_is_bounded(tmp_path, texts):
    writer, status = writer_of(tmp_path), RunStatus(10, done_steps=3)
    logger = logging.getLogger("verl.test_sources")
    handler = WarningHandler(writer, status, texts)
    logger.addHandler(handler)
    try:
        for number in range(50):
            logger.warning("response %d is %s", number, "secret text")
        logger.info("not recorded")
    finally:
        logger.removeHandler(handler)
    writer.close()
    events = [row for row in recording.read(tmp_path).events.table().to_pylist() if row["kind"] == "warning"]
    assert len(events) == 20
    assert events[0]["message"] == ("response 0 is secret text" if texts else "response %d is %s")
    assert events[0]["step"] == 3
    assert json.loads(events[0]["data"]) == {"level": "WARNING", "logger": "verl.test_sources"}


def test_a_log_message_with_wrong_arguments_does_not_raise(tmp_path, capsys):
    writer = writer_of(tmp_path)
    handler = WarningHandler(writer, RunStatus(10), True)
    handler.emit(logging.LogRecord("verl.x", logging.WARNING, "x.py", 1, "count %d", ("a",), None))
    writer.close()
    assert "TypeError" in capsys.readouterr().err
    assert "warning" not in recording.read(tmp_path).events.table()["kind"].to_pylist()


def test_a_restart_is_recorded_with_its_cause(tmp_path):
    settings = load_config(None, ["data.train_files=a", "actor_rollout_ref.model.path=a/b"], check_files=False).trainer
    record_restart(tmp_path, "no recording", 1, settings.record)
    assert list(tmp_path.iterdir()) == []
    writer_of(tmp_path).close()
    settings.record.redact = ["rank \\d"]
    record_restart(tmp_path, "actor rank 3 died: a text", 7, settings.record)
    run = recording.read(tmp_path)
    event = run.events.table().to_pylist()[-1]
    assert (event["kind"], event["message"], event["step"]) == ("restart", "actor [redacted] died: a text", 7)
    settings.record.texts = False
    record_restart(tmp_path, "actor rank 3 died: a text", 7, settings.record)
    assert run.events.table().to_pylist()[-1]["message"] == "actor rank 3 died"
    assert len(run.attempts) == 1
    assert RecordWriter(tmp_path / "record", {}, first_step=3).attempt == 2


def test_the_recording_moves_aside_with_the_steps_of_its_run(tmp_path):
    writer_of(tmp_path).close()
    (tmp_path / "global_step_1").mkdir()
    aside = move_aside(tmp_path)
    assert aside is not None
    assert recording.read(aside).attempts
    assert not (tmp_path / "record").exists()


def test_a_pattern_that_is_no_regular_expression_is_rejected():
    needed = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=x"]
    with pytest.raises(ConfigError, match=r"trainer\.record\.redact = a\("):
        load_config(None, [*needed, "trainer.record.redact=['a(']"])
