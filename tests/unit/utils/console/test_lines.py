"""One line per step, on fixed metrics."""

import math

import pytest

from verl.utils.console import format_duration, phase_seconds, step_line, validation_scores

GRPO = {
    "reward/mean": 0.35,
    "kl/mean": 0.002,
    "actor/loss": 0.2344321,
    "actor/entropy": 1.0781,
    "actor/skipped_steps": 0.0,
    "critic/rewards/max": 1.0,
    "critic/score/mean": 0.35,
    "response_length/mean": 183.25,
    "response_length/max": 512.0,
    "response_length/clip_ratio": 0.0125,
    "reward/errors": 0.0,
    "timing_s/step": 12.5,
    "timing_s/gen": 6.0,
    "timing_s/update_actor": 4.0,
    "timing_s/ref": 1.0,
    "timing_s/old_log_prob": 0.75,
    "timing_s/update_weights": 0.5,
    "timing_s/reward": 0.125,
    "timing_s/waiting_for_one_rank": 3.0,
    "perf/total_num_tokens": 250000.0,
    "perf/time_per_step": 12.5,
    "perf/throughput": 2500.0,
}


def test_a_step_of_grpo_has_no_critic_and_no_constants():
    assert step_line(GRPO, 7, eta=754.0, notes=["math Correct: 90/256, Accuracy: 0.35"]) == (
        "step 7: reward_mean=0.35, kl=0.002, actor_loss=0.2344, entropy=1.078, length=183.2 (1.2% cut)"
        " | math Correct: 90/256, Accuracy: 0.35"
        " | 12.5 s (rollout 6.00, train_actor 4.00, ref 1.00, old_log_prob 0.75, update_weights 0.50, other 0.25)"
        " | 20000 tokens/s | ETA 12 min 34 s"
    )


def test_validation_save_and_problems_are_part_of_the_line():
    more = {
        "critic/loss": 0.5,
        "val/openai/gsm8k/accuracy": 0.75,
        "val-core/openai/gsm8k/reward/mean@1": 0.75,
        "timing_s/testing": 30.0,
        "timing_s/save_checkpoint": 1.0,
        "reward/errors": 3.0,
        "actor/skipped_steps": 1.0,
        "response_length/clip_ratio": 0.0,
    }
    line = step_line(GRPO | more, 8)
    assert "actor_loss=0.2344, critic_loss=0.5, entropy" in line
    assert "length=183.2, val_accuracy=0.75, reward_errors=3, actor_updates_skipped=1 |" in line
    assert "other 0.25) + validation 30.0 s + save_checkpoint 1.00 s |" in line
    assert "ETA" not in line


def test_steps_of_sft_and_of_a_reward_model():
    sft = {"train/loss": 0.61, "train/grad_norm": 0.7, "train/lr": 1e-5, "timing_s/step": 0.25}
    assert step_line(sft, 3) == "step 3: train_loss=0.61, grad_norm=0.7 | 0.25 s"
    rm = sft | {"train/accuracy": 0.9, "val/loss": 0.2, "val/accuracy": 0.99, "timing_s/testing": 2.0}
    assert step_line(rm, 4) == (
        "step 4: train_loss=0.61, val_loss=0.2, val_accuracy=0.99, train_accuracy=0.9, grad_norm=0.7"
        " | 0.25 s + validation 2.00 s"
    )


def test_metrics_of_users_appear_if_nothing_else_does():
    assert step_line({"b": 2, "a": math.nan, "note": "text"}, 1) == "step 1: a=nan, b=2, note=text"


def test_scores_of_several_sources():
    two = {"val/a/accuracy": 0.5, "val-core/b/reward/mean@4": 1.5, "val-core/b/reward/best@4/mean": 9.0}
    assert validation_scores(two) == {"val_accuracy(a)": 0.5, "val_score(b)": 1.5}
    assert validation_scores({"val-core/b/reward/mean@4": 1.5}) == {"val_score": 1.5}
    many = {f"val/{name}/accuracy": value for name, value in zip("abcd", (0.0, 0.5, 0.5, 1.0), strict=True)}
    assert step_line(many, 2) == "step 2: val_mean=0.5 (4 sources)"


def test_phases_add_up_to_the_step():
    phases = phase_seconds(GRPO)
    assert next(iter(phases)) == "rollout"
    assert sum(phases.values()) == 12.5
    assert phases["other"] == 0.125
    assert phase_seconds({"timing_s/step": 1.0}) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.004, "0.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7_629.0, "2 h 07 min"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
