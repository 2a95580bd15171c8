"""A whole run whose reward function raises, hangs, dies and returns nonsense: it goes on, and says what it lost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from training_harness import make_task, overrides, run_training

from verl.workers.reward_manager.naive import RewardError

REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    row = extra_info["index"] % 8
    if row == 1:
        raise RuntimeError("row 1 never works")
    if row == 2:
        time.sleep(1000)
    if row == 3:
        os._exit(1)
    if row == 4:
        return float("nan")
    score = len(set(solution_str)) / 8
    return {"score": score, "bonus": 1.0} if row == 5 else score
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    made = make_task(tmp_path_factory.mktemp("task"), rows=8)
    Path(made["reward"]).write_text(REWARD)
    return made


def test_the_run_goes_on_and_counts_what_could_not_be_scored(task, tmp_path):
    arguments = overrides(
        task,
        tmp_path,
        "algorithm=grpo",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer={enable: true, len: 4, log: true}",
        "reward_model.reward_kwargs={timeout: 1.5, num_processes: 2}",
        "data.val_files=[]",
        "trainer.total_training_steps=2",
    )
    history = run_training(arguments).history
    assert len(history) == 2
    for metrics in history:  # every prompt is in every step, twice
        assert metrics["reward/errors"] == 8
        kinds = {kind: metrics[f"reward/errors/{kind}"] for kind in ("raised", "timeout", "died", "invalid")}
        assert kinds == {"raised": 2, "timeout": 2, "died": 2, "invalid": 2}
        assert metrics["reward/bonus/mean"] == 1.0
        assert -1.0 <= metrics["reward/overlong_reward/mean"] <= 0.0
        assert math.isfinite(metrics["actor/loss"])


def test_the_run_stops_where_it_should(task, tmp_path):
    arguments = overrides(
        task, tmp_path, "reward_model.on_error=fail", "reward_model.reward_kwargs={timeout: 1.5}", "data.val_files=[]"
    )
    with pytest.raises(RewardError, match=r"4 of 8 samples could not be scored"):
        run_training(arguments)
