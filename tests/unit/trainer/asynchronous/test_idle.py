"""Idle shares of trainer and rollout, and the key that the verdict names."""

from __future__ import annotations

import pytest

from verl.trainer.asynchronous.idle import Idle, IdleTime, verdict


def test_shares_are_the_waiting_phases_and_the_load_beside_the_largest_one():
    now = [0.0]
    idle = IdleTime(lambda: now[0])
    idle.under_way(8)
    now[0] = 2.0
    idle.under_way(4)  # 8 for 2 s, then 4 for 2 s: 24 of 32 answer seconds
    now[0] = 4.0
    metrics = idle.step({"step": 4.0, "gen": 1.0, "update_actor": 3.0})
    assert metrics == pytest.approx({"trainer/idle_ratio": 0.25, "rollouter/idle_ratio": 0.25})
    idle.under_way(0)
    now[0] = 8.0  # a second step in which nothing is generated
    metrics = idle.step({"step": 4.0, "gen": 1.0, "reward": 2.0})
    assert metrics == pytest.approx({"trainer/idle_ratio": 0.75, "rollouter/idle_ratio": 1.0})
    assert idle.shares() == Idle(pytest.approx(0.5), pytest.approx(1 - 24 / 64))


@pytest.mark.parametrize(
    ("trainer", "rollout", "mode", "staleness", "partial", "own", "named"),
    [
        (0.02, 0.03, "async", 2, True, True, "little is left to gain"),
        (0.0, 0.5, "async", 2, True, True, "trainer.max_staleness=1"),
        (0.0, 0.5, "async", 1, True, False, "training limits the run"),
        (0.4, 0.0, "async", 1, True, True, "actor_rollout_ref.rollout.n_gpus_per_node"),
        (0.4, 0.0, "async", 1, True, False, "actor_rollout_ref.rollout.gpu_memory_utilization"),
        (0.4, 0.4, "one_step_off", 1, False, True, "trainer.mode=async"),
        (0.4, 0.4, "async", 2, False, True, "trainer.partial_rollout=True"),
        (0.4, 0.4, "async", 2, True, True, "trainer.max_staleness=3"),
    ],
)
def test_the_verdict_names_the_key_that_would_help(trainer, rollout, mode, staleness, partial, own, named):
    said = verdict(Idle(trainer, rollout), mode, staleness, partial, own)
    assert named in said
    assert f"{trainer:.0%}" in said
