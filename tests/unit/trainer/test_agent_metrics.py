"""What is logged and written of a step's agents, by hand."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
import torch

from tests.support.tiny import tiny_tokenizer
from verl.config import RolloutConfig, as_config
from verl.protocol import DataProto
from verl.recording.redaction import Redaction
from verl.trainer.common.dumps import write_jsonl
from verl.trainer.common.run_summary import describe_bottleneck
from verl.trainer.ppo.recorded_rows import RecordedStep, RowOptions
from verl.trainer.ppo.scoring import ToolUseCheck, agent_metrics
from verl.types.trajectory import Row, Trajectory, Turn
from verl.workers.rollout.training_rows import rows_from_trajectories

TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def model(text: str, **fields) -> Turn:
    return Turn("model", ids(text), finish_reason="stop", **fields)


def batch() -> DataProto:
    """A slow one in two rows, a quick one, and one that failed."""
    slow = {
        "generate_s": 2.0,
        "tool_s": 6.0,
        "compute_score_s": 0.5,
        "tool_calls": 3,
        "num_preempted": 1,
        "failures": {"timeout": 1, "unknown": 1},
        "tools": {"search": {"calls": 3, "errors": 1, "seconds": 6.0}},
        "unmatched_tokens": 4,
        "status": "finished",
    }
    quick = {"generate_s": 1.0, "tool_s": 1.0, "tools": {"search": {"calls": 1, "errors": 0, "seconds": 1.0}}}
    quick |= {"tool_calls": 1, "status": "finished"}
    failed = {"status": "failed", "error": "KeyError: 'x'", "failures": {"loop": 1}}
    first = [
        model("<call>", reward=0.5),
        Turn("environment", ids("no such\nthing"), name="search", reward=-0.25),
        model("ok"),
    ]
    trajectories = [
        Trajectory("a", 0, [Row(ids("ask"), first), Row(ids("again"), [model("end")])], extra={"agent_metrics": slow}),
        Trajectory("a", 1, [Row(ids("ask"), [model("yes")])], extra={"agent_metrics": quick, "place": math.nan}),
        Trajectory("b", 0, [Row(ids("ask"), [model("lost")])], "failed", extra={"agent_metrics": failed}),
    ]
    return rows_from_trajectories(trajectories, pad_token_id=0)


def test_the_metrics_of_a_steps_agents_by_hand():
    found = agent_metrics(batch())
    expected = {
        "agent_loop/generate_sequences/min": 0.0,
        "agent_loop/generate_sequences/max": 2.0,
        "agent_loop/generate_sequences/mean": 1.0,
        "agent_loop/tool_calls/max": 6.0,
        "agent_loop/compute_score/mean": 0.5 / 3,
        "agent_loop/num_preempted/max": 1.0,
        "tool_call_counts/min": 0.0,
        "tool_call_counts/max": 3.0,
        "tool_call_counts/mean": 4 / 3,
        "agent_loop/slowest/generate_sequences": 2.0,
        "agent_loop/slowest/tool_calls": 6.0,
        "agent_loop/slowest/compute_score": 0.5,
        "agent_loop/slowest/num_preempted": 1.0,
        "agent_loop/slowest/prompt_length": 3.0,
        "agent_loop/slowest/response_length": 6.0 + 13 + 2 + 3,
        "agent_loop/tool_share": 0.7,
        "agent_loop/trajectories/failed": 1.0,
        "agent_loop/trajectories/aborted": 0.0,
        "agent_loop/failures/timeout": 1.0,
        "agent_loop/failures/unknown": 1.0,
        "agent_loop/failures/loop": 1.0,
        "agent_loop/tools/search/calls": 4.0,
        "agent_loop/tools/search/errors": 1.0,
        "agent_loop/tools/search/seconds": 7.0,
        "agent_loop/unmatched_tokens": 4.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert agent_metrics(DataProto.from_dict({"response_mask": torch.ones(1, 1)})) == {}


def test_tools_that_nobody_calls_are_said_once_after_three_steps(caplog):
    given = as_config(RolloutConfig, {"multi_turn": {"function_tool_path": "tools.py"}})
    none, some = {"tool_call_counts/max": 0.0}, {"tool_call_counts/max": 2.0}
    with caplog.at_level(logging.WARNING):
        for steps in ([none, none, some, none, none, none], [{}] * 4):
            watch = ToolUseCheck(given)
            for metrics in steps:
                watch.check(metrics, lambda: "text")
        without = ToolUseCheck(as_config(RolloutConfig, {}))
        for _ in range(4):
            without.check(none, lambda: "text")
        assert not caplog.records
        watch, searching = ToolUseCheck(given), ToolUseCheck(as_config(RolloutConfig, {}), searches=True)
        for _ in range(9):
            watch.check(none, lambda: "I would rather guess")
        for _ in range(9):
            searching.check(none, lambda: "I know it")
    record, other = caplog.records
    assert "<search> query </search>" in other.getMessage()
    for words in ("no tool was called in 3 steps", "tools.py", "multi_turn.format=hermes", "I would rather guess"):
        assert words in record.getMessage()


def test_the_verdict_knows_whether_generation_waits_for_tools():
    seconds = {"step": 10.0, "gen": 8.0, "update_actor": 2.0}
    assert "gen took 80% of the time; what helps: shorter responses" in describe_bottleneck(seconds, tool_share=0.2)
    slow = describe_bottleneck(seconds, tool_share=0.75)
    assert "gen took 80% of the time, 75% of it in tools" in slow
    assert "multi_turn.tool_timeout" in slow
    assert "in tools" not in describe_bottleneck({"gen": 1.0, "update_actor": 2.0}, tool_share=0.75)


def test_a_dump_shows_a_person_who_said_what_and_what_it_earned(tmp_path):
    rows = batch()
    rows.batch["token_level_scores"] = torch.zeros(rows.batch["responses"].shape)
    rows.batch["token_level_scores"][1, 2] = 1.0
    options = RowOptions(TOKENIZER, Redaction(), texts=False, max_bytes=0)
    recorded = RecordedStep(rows, 3, version=0, reward_names=(), options=options).fetch_tokens()
    path = write_jsonl(recorded.lines(), tmp_path / "3.jsonl")
    first, second, third = (json.loads(line) for line in path.read_text().splitlines())
    assert {name: first[name] for name in ("step", "input", "output", "score", "status", "uid")} == {
        "step": 3,
        "input": "ask",
        "output": "end",
        "score": 1.0,
        "status": "finished",
        "uid": "a",
    }
    assert first["turns"] == [
        {"by": "model", "text": "<call>", "reward": 0.5},
        {"by": "search", "text": "no such\nthing", "reward": -0.25},
        {"by": "model", "text": "ok"},
        {"by": "model", "text": "end"},
    ]
    assert first["rows"] == [["ask", "<call>no such\nthingok"], ["again", "end"]]
    assert second["turns"] == [{"by": "model", "text": "yes"}]
    assert "rows" not in second
    assert (third["status"], third["turns"]) == ("failed", [{"by": "model", "text": "lost"}])
    assert third["agent_metrics"]["error"] == "KeyError: 'x'"


def test_what_is_not_finite_is_null_in_a_dump(tmp_path):
    rows = [{"a": math.nan, "b": [1.0, math.inf], "c": np.array([np.nan, 2.0]), "d": {"e": np.float32("nan")}}]
    text = write_jsonl(rows, tmp_path / "x.jsonl").read_text()
    assert json.loads(text) == {"a": None, "b": [1.0, None], "c": [None, 2.0], "d": {"e": None}}
    assert "NaN" not in text
