"""The summary of a run, from metrics in memory and from its file."""

import json
import math

import pytest

from verl.cli.main import main
from verl.trainer.common.run_summary import RunSummary, read_summary

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
