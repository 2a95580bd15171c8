"""Which steps without an update end a run, and the errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config import load_config
from verl.trainer.common.training_health import (
    NonFiniteError,
    NoSamplesError,
    UpdateCheck,
    explain_initial_weights,
    update_remedies,
)

GOOD = {"actor/skipped_steps": 0.0, "critic/skipped_steps": 0.0}
EMPTY = {"actor/skipped_steps": 0.0, "actor/empty_steps": 1.0}
HALF_EMPTY = {"actor/skipped_steps": 0.0, "actor/empty_steps": 0.5}
BROKEN = {"actor/skipped_steps": 0.25}
SEARCH = {"actor/skipped_steps": 0.0, "actor/loss_scale_search_steps": 1.0}


@pytest.mark.parametrize(("bad", "error"), [(EMPTY, NoSamplesError), (BROKEN, NonFiniteError)])
def test_only_a_run_of_bad_steps_ends_it(bad, error):
    updates = UpdateCheck(limit=2)
    for metrics in (bad, GOOD, bad):
        updates.check(metrics)
    with pytest.raises(error, match=r"trainer\.max_nonfinite_steps"):
        updates.check(bad)


def test_a_step_that_learnt_from_some_mini_batches_or_searches_its_loss_scale_continues():
    updates = UpdateCheck(limit=1)
    for metrics in (GOOD, HALF_EMPTY, SEARCH, {}):
        updates.check(metrics)


def test_steps_without_samples_name_the_last_reward_error_or_what_else_it_may_be():
    with pytest.raises(NoSamplesError, match=r"reward_model\.on_error=zero(.|\n)*the judge is down"):
        UpdateCheck(limit=1).check({"critic/empty_steps": 1.0}, "row 0: the judge is down")
    with pytest.raises(NoSamplesError, match=r"rollout_correction\.rollout_rs"):
        UpdateCheck(limit=1).check(EMPTY)


@pytest.mark.parametrize(
    ("metrics", "changed"),
    [
        (GOOD, True),
        ({}, True),
        (BROKEN, True),
        (HALF_EMPTY, True),
        (EMPTY, False),
        (SEARCH, False),
        ({"actor/skipped_steps": 0.5, "actor/empty_steps": 0.5}, False),
        ({"critic/empty_steps": 1.0}, True),
    ],
)
def test_the_policy_has_a_new_version_only_where_an_update_reached_it(metrics, changed):
    assert UpdateCheck(limit=1).record_update(metrics, "actor") is changed


@pytest.mark.parametrize(
    ("keys", "advised", "left_out"),
    [
        (
            ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.optim.lr=3e-4"],
            "Lower, in this order: actor_rollout_ref.actor.optim.lr (0.0003 → 0.00015), actor_rollout_ref.actor.clip",
            ["critic", "ppo_epochs", "grad_clip"],
        ),
        (
            [
                "critic.optim.lr=0.02",
                "actor_rollout_ref.actor.ppo_epochs=4",
                "actor_rollout_ref.actor.use_kl_loss=True",
            ],
            "critic.optim.lr (0.02 → 0.01)",
            ["kl_loss_coef"],
        ),
    ],
)
def test_advice_names_the_values_of_the_run_and_only_keys_that_it_uses(keys, advised, left_out):
    files = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=org/model", "trainer.n_gpus_per_node=1"]
    advice = update_remedies(load_config(None, [*files, *keys], check_files=False))
    assert advised in advice
    assert [key for key in left_out if key in advice] == []


def test_a_resumed_run_names_the_checkpoint():
    message = explain_initial_weights("actor_rollout_ref.model.path", "org/model", Path("/runs/global_step_7"))
    assert "resumed from /runs/global_step_7" in message
    assert "trainer.resume_from_path" in message
