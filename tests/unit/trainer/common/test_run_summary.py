"""The summary of a run, from metrics in memory and from its file."""

from __future__ import annotations

import json
import math

import pytest

from verl.cli.main import main
from verl.config import load_config
from verl.trainer.common.run_summary import (
    ModeSettings,
    ModeTimes,
    RunSummary,
    async_step_seconds,
    describe_bottleneck,
    read_summary,
    sync_step_seconds,
)

STEPS = [
    (0, 100.0, {"val/math/accuracy": 0.125}),
    (1, 110.0, {"reward/mean": 0.25, "timing_s/step": 8.0, "timing_s/gen": 6.0, "perf/total_num_tokens": 800.0}),
    (2, 114.0, {"reward/mean": 0.75, "timing_s/step": 4.0, "timing_s/gen": 3.0, "perf/total_num_tokens": 800.0}),
    (
        3,
        1000.0,
        {
            "reward/mean": 0.5,
            "timing_s/step": 4.0,
            "timing_s/gen": 3.0,
            "timing_s/testing": 4.0,
            "val/math/accuracy": 0.5,
            "perf/total_num_tokens": 800.0,
        },
    ),
]
LINES = [
    "Summary: 3 steps in 22.0 s",
    "  val_accuracy  0.125 -> 0.5",
    "  reward_mean   0.25 -> 0.5, best 0.75 at step 2",
    "  tokens/s      150 in steps",
    "  phase             seconds  share  per step",
    "  rollout              12.0    55%      4.00",
    "  other                 4.0    18%      1.33",
    "  validation            4.0    18%      1.33",
    "  between steps         2.0     9%      0.67",
]

SYNC, ASYNC = ModeSettings("sync", 3, overlaps=False), ModeSettings("async", 3, overlaps=False)


@pytest.fixture
def summary() -> RunSummary:
    summary = RunSummary()
    for step, logged_at, metrics in STEPS:
        summary.add(step, metrics, logged_at)
    return summary


def test_what_improved_and_where_the_time_went(summary):
    *lines, advice = summary.render().splitlines()
    assert lines == LINES, "the interruption before step 3 does not count"
    assert advice.startswith("  after the first step, rollout took 60% of the time; what helps: shorter responses")
    assert summary.bottleneck().startswith("after the first step, gen took 60%"), "as in metrics"


def test_a_slow_step_and_a_slow_rank_are_named():
    summary = RunSummary()
    for step, seconds in enumerate((9.0, 2.0, 2.0), start=1):
        summary.add(step, {"timing_s/step": seconds, "timing_s/waiting_for_one_rank": 1.0}, float(step))
    text = summary.render()
    assert "slowest step: 1 with 9.00 s (median 2.00 s)" in text
    assert "waiting for one slow rank: 3.00 s" in text
    assert "what helps" not in text, "steps without phases"


def test_smaller_losses_are_better_and_nan_is_left_out():
    summary = RunSummary()
    for step, loss in enumerate((3.0, 1.0, math.nan, 2.0)):
        summary.add(step, {"train/loss": loss}, 0.0)
    assert summary.curves["train_loss"].render() == "3 -> 2, best 1 at step 1"


def test_the_command_prints_the_same_from_the_file(summary, tmp_path, capsys):
    records = [{"step": step, "time": logged_at, "data": data} for step, logged_at, data in STEPS]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 4, "da')
    assert read_summary(file) == summary
    for argument in (tmp_path, file):
        assert main(["summary", str(argument)]) == 0
        assert capsys.readouterr().out == summary.render() + "\n"
    assert main(["summary", "--json", str(tmp_path)]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["steps"] == 3
    assert numbers["metrics"]["reward_mean"] == {"first": 0.25, "last": 0.5, "best": 0.75, "best_step": 2}
    assert next(iter(numbers["seconds"].items())) == ("rollout", 12.0)


def test_the_folder_of_a_run_has_its_metrics_in_the_recording(summary, tmp_path, capsys):
    (tmp_path / "record").mkdir()
    records = [{"step": step, "time": logged_at, "data": data} for step, logged_at, data in STEPS]
    (tmp_path / "record/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["summary", str(tmp_path)]) == 0
    assert capsys.readouterr().out == summary.render() + "\n"


def test_next_commands_come_from_the_stored_configuration(tmp_path, capsys):
    trainer = {"default_local_dir": str(tmp_path), "logger": ["file"], "tracking_dir": str(tmp_path / "a run")}
    trainer |= {"project_name": "p", "experiment_name": "e"}
    (tmp_path / "config.json").write_text(json.dumps({"trainer": trainer}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "data": {"train/loss": 1.0}}\n')
    assert main(["summary", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"  summary:  verl summary '{tmp_path}/a run'"


def test_a_folder_without_metrics_is_an_error_that_names_the_key(tmp_path, capsys):
    assert main(["summary", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "trainer.default_local_dir" in message
    assert "trainer.tracking_dir" in message
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    assert main(["summary", str(tmp_path)]) == 2
    assert "contains no training steps" in capsys.readouterr().err


def test_the_bottleneck_is_that_of_the_steps_after_the_first():
    """The first step includes compilation."""
    summary = RunSummary()
    for step, update in enumerate((20.0, 1.0, 1.0), start=1):
        metrics = {"timing_s/step": 2.0 + update, "timing_s/gen": 2.0, "timing_s/update_actor": update}
        summary.add(step, metrics, logged_at=100.0 * step)
    assert summary.bottleneck().startswith("after the first step, gen took 67% of the time")


def step(seconds, gen, mean, longest, **more):
    return {
        "timing_s/step": seconds,
        "timing_s/gen": gen,
        "response_length/mean": mean,
        "response_length/max": longest,
        **more,
    }


def test_equal_lengths_gain_nothing():
    assert async_step_seconds(4.0, 3.0, 1.0, 3) == 4.0
    assert sync_step_seconds(4.0, 3.0, 1.0, 3) == 4.0


def test_a_synchronous_generation_of_the_longest_becomes_one_of_the_mean():
    assert async_step_seconds(4.0, 3.0, 0.5, 3) == 2.5, "half of 3 s"
    assert async_step_seconds(4.0, 3.0, 0.1, 3) == 1.75, "the longest takes 3 s, within four steps"
    assert async_step_seconds(4.0, 3.0, 0.1, 0) == 4.0


@pytest.mark.parametrize("evenness", [1.0, 0.5, 0.1])
def test_both_directions_agree(evenness):
    estimate = async_step_seconds(4.0, 3.0, evenness, 3)
    waiting = estimate - 1.0  # the rest of a step takes 1 s
    assert sync_step_seconds(estimate, waiting, evenness, 3) == pytest.approx(4.0)


def test_generation_that_overlaps_training_counts_when_it_is_busy():
    assert sync_step_seconds(4.0, 1.0, 0.5, 3, busy=3.0) == 9.0, "3 s of training and 3 / 0.5 s of generation"


def test_steps_are_averaged_and_lengths_are_those_of_all_steps():
    times = ModeTimes()
    for metrics in (step(4.0, 3.0, 100, 200), step(6.0, 5.0, 200, 400), {"timing_s/step": 9.0}):
        times.add(metrics)
    assert times.estimate(SYNC) == 3.0, "5 - 4 / 2"
    assert times.estimate(ASYNC) == 9.0, "5 - 4 + 4 / 0.5"
    assert "async with max_staleness=3 on the same devices: about 3.00 s" in times.render(SYNC)
    assert "instead of 5.00 (1.67x)" in times.render(SYNC)
    overlapping = ModeTimes()
    overlapping.add(step(4.0, 1.0, 100, 200, **{"rollouter/idle_ratio": 0.25}))
    assert overlapping.estimate(ModeSettings("async", 3, overlaps=True)) == 9.0
    assert ModeTimes().render(SYNC) is None


def test_settings_of_a_configuration_and_of_its_stored_values():
    given = ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.n_gpus_per_node=1"]
    expected = {
        (): ModeSettings("sync", 1, overlaps=False),
        ("trainer.mode=async", "trainer.max_staleness=2"): ModeSettings("async", 2, overlaps=False),
        ("trainer.mode=one_step_off", "trainer.max_staleness=2"): ModeSettings("one_step_off", 1, overlaps=True),
        ("trainer.mode=async", "actor_rollout_ref.rollout.nnodes=1"): ModeSettings("async", 1, overlaps=True),
    }
    for keys, settings in expected.items():
        config = load_config(None, [*given, *keys], check_files=False)
        assert ModeSettings.from_config(config) == settings
        assert ModeSettings.from_config(json.loads(json.dumps(config.to_dict()))) == settings
    assert ModeSettings.from_config({"trainer": {"total_epochs": 1}}) is None


def test_the_summary_has_the_estimate_without_the_first_step_and_not_for_tools(tmp_path, capsys):
    config = {"trainer": {"mode": "sync", "max_staleness": 1, "overlap": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    steps = [step(60.0, 3.0, 50, 200), step(4.0, 2.0, 100, 200), step(4.0, 2.0, 100, 200)]

    def summary(*more):
        records = [{"step": n, "time": 0.0, "data": data | dict(more)} for n, data in enumerate(steps, start=1)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        assert main(["summary", str(tmp_path)]) == 0
        return capsys.readouterr().out

    assert "about 3.00 s per step after the first instead of 4.00" in summary()
    assert "instead of" not in summary(("agent_loop/tool_share", 0.5))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("overrides", "hints"),
    [
        (
            ["actor_rollout_ref.model.enable_gradient_checkpointing=False"],
            "a larger actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=True"],
            "a larger actor_rollout_ref.actor.ppo_max_token_len_per_gpu, no gradient checkpointing if memory suffices"
            " (actor_rollout_ref.model.enable_gradient_checkpointing=False)",
        ),
    ],
)
def test_hints_are_changes_that_the_configuration_does_not_have(overrides, hints, plain):
    required = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=model", "trainer.device=cpu"]
    config = load_config(overrides=[*required, *overrides], check_files=False)
    text = describe_bottleneck({"update_actor": 1.0}, config=config.to_dict() if plain else config)
    assert text == f"update_actor took 100% of the time; what helps: {hints}"


@pytest.mark.parametrize("phase", ["ref", "old_log_prob", "values"])
def test_one_size_of_micro_batches_is_named(phase):
    required = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=model", "trainer.device=cpu"]
    text = describe_bottleneck({phase: 1.0}, config=load_config(overrides=required, check_files=False))
    assert "micro_batch_size_per_gpu" in text
    assert "max_token_len_per_gpu" not in text
