"""Health rules: each reports its problem with the steps and figure, and is silent on a healthy run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.recordings import HOSTILE, close, open_writer, write_run, write_step
from verl.recording import health, read
from verl.recording.health import RunTables, learning, operation

STEPS = 20


def tables(first: int = 1, **columns: Any) -> RunTables:
    """Metrics of 20 steps; `__` in names stands for a slash."""
    metrics = {name.replace("__", "/"): np.broadcast_to(np.asarray(v, float), STEPS) for name, v in columns.items()}
    steps = np.arange(first, first + STEPS, dtype=float)
    return RunTables(metrics={"step": steps, "time": 100 + 10 * steps, **metrics})


def groups(no_signal: Any, failed: Any = 0.0) -> RunTables:
    run = tables()
    columns = {"no_signal": no_signal, "failed": failed, "all_best": 0.25}
    arrays = {name: np.broadcast_to(np.asarray(value, float), STEPS) for name, value in columns.items()}
    run.groups = {"step": np.arange(1, STEPS + 1), **arrays}
    return run


def from_step(step: int, before: float, after: float) -> np.ndarray:
    """A value that changes at a step."""
    return np.where(np.arange(1, STEPS + 1) < step, before, after)


RISING = np.linspace(0.2, 0.8, STEPS)
VALIDATION = np.full(STEPS, np.nan)
VALIDATION[[3, 7, 11, 15, 19]] = [0.5, 0.6, 0.55, 0.5, 0.45]

# Rule, a run with its problem, first and last step, a part of the figure.
CASES: dict[str, tuple[RunTables, int, int, str]] = {
    "no_signal": (groups(from_step(11, 0.3, 0.75)), 11, 20, "75%"),
    "constant_reward": (tables(reward__mean=from_step(8, 0.3, 1.0)), 8, 20, "is 1 in every step since step 8"),
    "truncation": (tables(response_length__clip_ratio=from_step(5, 0.1, 0.4)), 5, 20, "40%"),
    "entropy_collapse": (tables(actor__entropy=from_step(15, 1.0, 0.1)), 15, 20, "0.1 nats now, 1 at the beginning"),
    "growing_mismatch": (tables(rollout__log_prob_diff_mean=from_step(9, 0.01, 0.05)), 9, 20, "0.05 nats"),
    "diverging_kl": (tables(actor__approx_kl=from_step(3, 0.01, -0.5)), 3, 20, "-0.5"),
    "exploding_gradient": (tables(actor__grad_norm=from_step(18, 0.5, 50.0)), 18, 20, "50, its median 0.5"),
    "reward_without_validation": (
        tables(reward__mean=RISING, val__math__accuracy=VALIDATION), 8, 20, "val/math/accuracy -0.125"
    ),
    "length_drift": (tables(response_length__mean=from_step(12, 100.0, 300.0)), 12, 20, "300 tokens now, 100"),
    "failing_rewards": (tables(reward__scoring_failed__mean=from_step(20, 0.0, 0.5)), 20, 20, "50.0%"),
    "slow_rewards": (tables(timing_s__reward=from_step(6, 1.0, 5.0), timing_s__step=10.0), 6, 20, "50%"),
    "failing_agents": (groups(0.0, from_step(19, 0.0, 0.2)), 19, 20, "20%"),
    "waiting_for_one_rank": (
        tables(timing_s__waiting_for_one_rank=from_step(17, 0.1, 3.0), timing_s__step=10.0), 17, 20, "30%"
    ),
    "low_mfu": (tables(perf__mfu__actor=from_step(7, 0.3, 0.05)), 7, 20, "5.0%"),
    "slow_phase": (
        tables(timing_s__update_actor=np.where(np.arange(STEPS) == 13, 40.0, 4.0), timing_s__step=10.0), 14, 14, "40.0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rule_reports_its_problem(name):
    run, first, last, figure = CASES[name]
    finding = {rule.__name__: rule for rule in health.RULES}[name](run)
    assert finding is not None
    assert (finding.rule, finding.first_step, finding.last_step) == (name, first, last)
    assert figure in finding.figure
    assert finding.is_current == (last == STEPS)


@pytest.mark.parametrize("name", CASES)
def test_other_rules_do_not_report_it(name):
    related = {"constant_reward": {"no_signal"}, "slow_rewards": {"slow_phase"}, "waiting_for_one_rank": {"slow_phase"}}
    found = {finding.rule for finding in health.findings(CASES[name][0])}
    assert found - related.get(name, set()) == {name}


def test_a_healthy_run_has_no_finding():
    noise = 1 + 0.05 * np.random.default_rng(0).standard_normal(STEPS)
    run = tables(
        reward__mean=RISING, actor__entropy=noise, actor__grad_norm=noise, response_length__mean=300 * noise,
        response_length__clip_ratio=0.05, rollout__log_prob_diff_mean=0.01 * noise, actor__approx_kl=0.001 * noise,
        val__math__accuracy=np.where(np.isnan(VALIDATION), np.nan, RISING), timing_s__step=10 * noise,
        timing_s__gen=6 * noise, timing_s__reward=0.5 * noise,
    )  # fmt: skip
    assert health.findings(run) == []
    assert health.findings(RunTables()) == []


def test_a_problem_that_lasted_two_steps_is_none():
    share = np.zeros(STEPS)
    share[10:12] = 0.9
    assert learning.truncation(tables(response_length__clip_ratio=share)) is None
    share[12] = 0.9
    finding = learning.truncation(tables(response_length__clip_ratio=share))
    assert (finding.first_step, finding.last_step, finding.is_current) == (11, 13, False)


def test_a_waiting_trainer_is_a_problem_of_asynchronous_runs_only():
    run = tables(timing_s__gen=6.0, timing_s__step=10.0)
    assert operation.training_waits_for_generation(run) is None
    run.config = {"trainer": {"mode": "async", "max_staleness": 2}}
    assert operation.training_waits_for_generation(run).settings == [("trainer.max_staleness", "3")]


def test_a_phrase_in_most_new_answers():
    run = tables()
    usual = [f"we add {n} and {n} so that it is {2 * n} in total" for n in range(16)]
    run.first_texts, run.last_texts = usual, usual
    assert learning.common_phrase(run) is None
    run.last_texts = [f"{text} as an expert I am fully certain" for text in usual[:12]] + usual[12:]
    finding = learning.common_phrase(run)
    assert "in 75% of the responses" in finding.figure
    assert "as an expert I" in finding.figure


def test_a_full_cache_needs_waiting_requests():
    run = tables()
    run.engines = {"kv_used": np.full(40, 0.99), "waiting": np.zeros(40)}
    assert operation.full_kv_cache(run) is None
    run.engines = {"kv_used": np.full(40, 0.99), "waiting": np.full(40, 5.0)}
    assert operation.full_kv_cache(run).settings == [("actor_rollout_ref.rollout.gpu_memory_utilization", "0.5")]


def test_preemptions_in_more_than_a_tenth_of_the_records():
    run = tables()
    run.engines = {"preemptions": np.array([np.nan, 4.0, 3.0, *[0.0] * 18])}
    assert operation.preemptions(run) is None, "2 of 20"
    run.engines = {"preemptions": np.array([np.nan, 4.0, 3.0, 1.0, *[0.0] * 17])}
    finding = operation.preemptions(run)
    assert "8 preemptions in the newest 20 records" in finding.figure
    assert finding.settings == [("actor_rollout_ref.rollout.max_num_seqs", "512")]


def test_idle_devices():
    run = tables()
    run.devices = {"utilization": np.full(40, 0.2)}
    assert "20%" in operation.idle_devices(run).figure
    run.devices = {"utilization": np.full(40, 0.8)}
    assert operation.idle_devices(run) is None


def event(kind: str, step: int, message: str = "") -> dict[str, Any]:
    return {"kind": kind, "step": step, "message": message, "time": 0.0}


def test_restarts_have_their_cause():
    run = tables()
    run.events = [event("start", 0), event("end", 7, "WorkerDiedError: rank 3 died"), event("resume", 6)]
    finding = operation.restarts(run)
    assert "1 time." in finding.figure
    assert "rank 3 died" in finding.figure
    run.events = [event("start", 0)]
    assert operation.restarts(run) is None


def test_a_run_without_new_steps_has_stalled_unless_it_ended():
    run = tables()
    run.events = [event("start", 0)]
    run.now = 100 + 10 * STEPS + 90
    assert operation.stalled(run) is None
    run.now += 30
    assert "2 min; a step takes 10.0 s" in operation.stalled(run).figure
    run.events = [event("start", 0), event("end", STEPS)]
    assert operation.stalled(run) is None


def test_settings_that_the_run_already_has_are_not_advised():
    run = groups(0.9)
    assert learning.no_signal(run).settings == [("algorithm.filter_groups.enable", "True")]
    run.config = {"algorithm": {"filter_groups": {"enable": True}}}
    assert learning.no_signal(run).settings == []


def test_every_advised_key_exists():
    folder = Path(health.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    keys = set(re.findall(r'\("((?:algorithm|actor_rollout_ref|data|reward_model|trainer|optim)\.[a-z_.]+)", ', source))
    assert len(keys) > 8
    sections = _documented_keys(folder.parents[2] / "docs/reference/config.md")
    assert keys - sections == set()


def _documented_keys(path: Path) -> set[str]:
    keys, prefix = set(), ""
    for line in path.read_text().splitlines():
        if match := re.match(r"#{2,4} (\S+)$", line):
            prefix = match[1]
        elif match := re.match(r"\| `(\w+)` \|", line):
            keys.add(f"{prefix}.{match[1]}")
    return keys


def test_rules_read_recorded_streams(tmp_path):
    """Every group has equal scores in 1 of 3 groups; the metric of truncation is recorded by a run that truncates."""
    writer = open_writer(tmp_path, data={"max_response_length": 64})
    for step in range(1, 6):
        write_step(writer, step, {"response_length/clip_ratio": 0.5, "response_length/mean": 60.0})
    close(writer)
    run = health.load(read(tmp_path), now=1e12)
    assert run.groups["no_signal"].tolist() == pytest.approx([1 / 3] * 5)
    assert run.groups["all_best"].tolist() == pytest.approx([1 / 3] * 5)
    assert len(run.last_texts) == 6
    assert HOSTILE in run.last_texts
    found = {finding.rule: finding for finding in health.findings(run)}
    assert set(found) == {"truncation", "stalled"}
    assert found["truncation"].settings[0] == ("data.max_response_length", "128")


@pytest.mark.parametrize(("share", "level"), [(0.75, "warning"), (0.95, "alert")])
def test_groups_without_signal_are_an_alert_only_if_hardly_any_group_trains(share, level):
    assert learning.no_signal(groups(share)).level == level


def test_truncation_below_the_maximum_blames_other_limits():
    steps = np.arange(1.0, 6.0)
    metrics = {"step": steps, "response_length/clip_ratio": np.ones(5), "response_length/mean": np.full(5, 256.0)}
    run = health.RunTables(metrics=metrics, config={"data": {"max_response_length": 2048}})
    (finding,) = [finding for finding in health.findings(run) if finding.rule == "truncation"]
    assert finding.settings == []
    assert "256" in finding.figure


def test_a_cache_reads_every_step_once(tmp_path, monkeypatch):
    writer = open_writer(tmp_path)
    for step in range(1, 4):
        write_step(writer, step)
    close(writer)
    run, cache = read(tmp_path), {}
    first = health.load(run, now=1e12, cache=cache)
    monkeypatch.setattr(type(run.groups), "table", lambda *_, **__: pytest.fail("a step was read again"))
    second = health.load(run, now=1e12, cache=cache)
    assert second.groups["no_signal"].tolist() == first.groups["no_signal"].tolist()
    assert second.last_texts == first.last_texts


def test_a_recording_without_steps_has_no_finding(tmp_path):
    write_run(tmp_path, 0)
    assert health.findings(health.load(read(tmp_path), now=1e12)) == []
