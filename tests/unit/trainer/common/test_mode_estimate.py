"""The estimated step of the other mode, computed by hand."""

import json

import pytest

from verl.cli.main import main
from verl.config import load_config
from verl.trainer.common.mode_estimate import ModeSettings, ModeTimes, async_step_seconds, sync_step_seconds

SYNC, ASYNC = ModeSettings("sync", 3, overlaps=False), ModeSettings("async", 3, overlaps=False)


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
