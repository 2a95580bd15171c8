"""A policy loss brings its paper's aggregation and clip; what the user sets wins; the plan and the docs show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config import ActorConfig, PPOConfig, as_config, batch_plan, load_config
from verl.config.names import POLICY_LOSSES

ACTOR = "actor_rollout_ref.actor"
GIVEN = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "trainer.n_gpus_per_node=1"]
# From the papers: aggregation, clip down and up; None: the ratio is not clipped.
OWN = {
    "vanilla": ("token-mean", (0.2, 0.2)),
    "gspo": ("seq-mean-token-mean", (3e-4, 4e-4)),
    "cispo": ("token-mean", (1.0, 4.0)),
    "sapo": ("seq-mean-token-mean", None),
    "gpg": ("token-mean", None),
    "clip_cov": ("token-mean", (0.2, 0.2)),
    "kl_cov": ("token-mean", None),
    "geo_mean": ("seq-mean-token-mean", (0.4, 0.4)),
}


def load(loss: str, *overrides: str) -> PPOConfig:
    return load_config(None, [*GIVEN, f"{ACTOR}.policy_loss.loss_mode={loss}", *overrides], check_files=False)


def clip(config: PPOConfig) -> tuple[float, float]:
    return config.actor_rollout_ref.actor.clip_ratio_low, config.actor_rollout_ref.actor.clip_ratio_high


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_a_loss_alone_brings_its_own_values_and_the_plan_shows_them(loss):
    mode, distances = OWN[loss]
    config = load(loss)
    assert config.actor_rollout_ref.actor.loss_agg_mode == config.critic.loss_agg_mode == mode
    if distances is not None:
        assert clip(config) == distances
    shown = "no clip" if distances is None else f"clip {distances[0]:g}/{distances[1]:g}"
    line = next(line for line in batch_plan(config).render().splitlines() if line.startswith("  loss"))
    assert line.split(maxsplit=1)[1] == f"{loss}, {mode}, {shown}"
    assert load_config(config.to_dict(), check_files=False) == config
    assert as_config(ActorConfig, {"policy_loss": {"loss_mode": loss}}).loss_agg_mode == mode


def test_what_the_user_sets_wins_and_stands_beside_the_losss_own_in_the_plan():
    assert clip(load("gspo", f"{ACTOR}.clip_ratio=0.1")) == (0.1, 0.1)
    assert clip(load("gspo", f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.2")) == (0.1, 0.2)
    assert clip(load("gspo", f"{ACTOR}.clip_ratio_high=0.2")) == (3e-4, 0.2)
    config = load("gspo", f"{ACTOR}.clip_ratio_low=0.01", f"{ACTOR}.loss_agg_mode=token-mean")
    assert config.actor_rollout_ref.actor.loss_agg_mode == "token-mean"
    shown = "gspo, token-mean (default: seq-mean-token-mean), clip 0.01/0.0004 (default: 0.0003/0.0004)"
    assert shown in batch_plan(config).render()
    # The same number as PPO's default is a choice, too.
    assert clip(load("geo_mean", f"{ACTOR}.clip_ratio=0.2")) == (0.2, 0.2)


def test_a_loss_of_the_users_own_starts_from_the_usual_values():
    config = load("mine", "external_libs=[my_lib]")
    assert (config.actor_rollout_ref.actor.loss_agg_mode, *clip(config)) == ("token-mean", 0.2, 0.2)


def test_a_clip_that_the_loss_does_not_read_is_said():
    for loss, (_, distances) in OWN.items():
        said = any("does not clip the ratio" in notice for notice in load(loss, f"{ACTOR}.clip_ratio=0.3").notices)
        assert said is (distances is None)
        assert not any("clip" in notice for notice in load(loss).notices)


def test_the_docs_say_what_each_loss_brings_and_from_which_paper():
    text = (Path(__file__).parents[3] / "docs/guides/algorithms.md").read_text().partition("## Loss")[2]
    for loss, own in POLICY_LOSSES.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{loss}` |"))
        assert own.paper in row
        shown = "no clip" if own.clip is None else f"{own.clip[0]:g}/{own.clip[1]:g}"
        assert f"| `{own.loss_agg_mode}`; {shown}" in row
