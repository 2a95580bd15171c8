"""Idle shares of trainer and rollout, and the configuration key that `tuning_advice` names."""

from __future__ import annotations

import pytest

from verl.trainer.asynchronous.utilization import AsyncSetup, IdleShares, Utilization, tuning_advice


def test_shares_are_the_waiting_phases_and_the_load_beside_the_largest_one():
    now = [0.0]
    utilization = Utilization(lambda: now[0])
    utilization.set_in_flight(8)
    now[0] = 2.0
    utilization.set_in_flight(4)  # 8 for 2 s, then 4 for 2 s: 24 of 32 answer seconds
    now[0] = 4.0
    metrics = utilization.step({"step": 4.0, "gen": 1.0, "update_actor": 3.0})
    assert metrics == pytest.approx({"trainer/idle_ratio": 0.25, "rollouter/idle_ratio": 0.25})
    utilization.set_in_flight(0)
    now[0] = 8.0  # a second step in which nothing is generated
    metrics = utilization.step({"step": 4.0, "gen": 1.0, "reward": 2.0})
    assert metrics == pytest.approx({"trainer/idle_ratio": 0.75, "rollouter/idle_ratio": 1.0})
    assert utilization.shares() == IdleShares(pytest.approx(0.5), pytest.approx(1 - 24 / 64))


def test_loading_models_and_a_first_validation_are_no_idle_time_of_the_rollout():
    now = [0.0]
    utilization = Utilization(lambda: now[0])
    now[0] = 300.0
    utilization.begin()
    utilization.set_in_flight(8)
    now[0] = 304.0
    assert utilization.step({"step": 4.0})["rollouter/idle_ratio"] == pytest.approx(0.0)
    assert utilization.shares() == IdleShares(0.0, pytest.approx(0.0))


def test_answers_that_wait_for_their_turn_do_not_make_the_rollout_busier():
    now = [0.0]
    utilization = Utilization(lambda: now[0], max_concurrent=4)
    assert utilization.shares() is None, "no step yet"
    for seconds, in_flight in enumerate((100, 50, 4, 2)):
        now[0] = float(seconds)
        assert utilization.was_full is (seconds > 0)
        utilization.set_in_flight(in_flight)
    now[0] = 4.0
    utilization.step({"step": 4.0})
    shares = utilization.shares()
    assert shares is not None
    assert shares.rollout == pytest.approx(1 - (4 + 4 + 4 + 2) / 16)


OWN, SHARED = (
    AsyncSetup("async", 2, True, True, trained_staleness=2),
    AsyncSetup("async", 2, True, False, trained_staleness=2),
)
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("trainer", "rollout", "run", "named"),
    [
        (0.02, 0.03, OWN, "little is left to gain"),
        (0.0, 0.5, OWN, "trainer.n_gpus_per_node up"),
        (0.0, 0.5, SHARED, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        (0.4, 0.0, OWN, f"{ROLLOUT}.n_gpus_per_node"),
        (0.4, 0.0, SHARED, f"{ROLLOUT}.gpu_memory_utilization"),
        (0.4, 0.0, OWN._replace(limited_by_loops=True), f"{ROLLOUT}.agent.max_concurrent_requests"),
        (0.4, 0.4, OWN._replace(mode="one_step_off", partial_rollout=False), "trainer.mode=async"),
        (0.4, 0.4, OWN._replace(partial_rollout=False), "trainer.partial_rollout=True"),
        (0.4, 0.4, OWN, "trainer.max_staleness=3"),
        (0.4, 0.4, OWN._replace(evenness=0.9), "trainer.max_staleness=3"),
        (0.4, 0.4, SHARED._replace(evenness=0.5), "trainer.max_staleness=3"),
        (0.4, 0.4, SHARED._replace(evenness=0.9), "trainer.mode=sync"),
        (0.0, 0.5, SHARED._replace(evenness=0.9), "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        (0.4, 0.4, OWN._replace(trained_staleness=1), "trainer.n_gpus_per_node up"),
    ],
)
def test_the_advice_names_the_key_that_would_help(trainer: float, rollout: float, run: AsyncSetup, named: str):
    advice = tuning_advice(IdleShares(trainer, rollout), run)
    assert named in advice
    assert f"{trainer:.0%}" in advice
