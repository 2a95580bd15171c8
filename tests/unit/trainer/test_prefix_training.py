"""Runs of agents with and without shared prefixes: the same metrics and weights, in all passes of all roles."""

from __future__ import annotations

import pytest
import torch

from tests.support.training_harness import STEADY, make_task, overrides, run_training

ROLLOUT = "actor_rollout_ref.rollout"
SAME = ("actor/loss", "actor/grad_norm", "actor/kl_loss", "actor/entropy", "critic/loss", "critic/grad_norm")
# Agents with two rows per trajectory, a critic, a reference, and a separate pass for old log-probs.
RUN = (
    *STEADY,
    "algorithm=ppo",
    f"{ROLLOUT}.n=2",
    f"{ROLLOUT}.mode=async",
    f"{ROLLOUT}.agent.default_agent_loop=tests.support.agents.ContextRewriter",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.old_log_prob_from_update=False",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="full"),
        pytest.param(("actor_rollout_ref.model.lora_rank=4",), id="adapters", marks=pytest.mark.slow),
    ],
)
def test_agents_train_the_same_with_shared_prefixes(tmp_path, more):
    task = make_task(tmp_path)
    plain, shared = (
        run_training(
            overrides(task, tmp_path / mode, *RUN, *more, f"actor_rollout_ref.actor.use_prefix_grouper={mode}")
        )
        for mode in ("False", "auto")
    )
    for one, other in zip(plain.history, shared.history, strict=True):
        assert {name: other[name] for name in SAME} == pytest.approx(
            {name: one[name] for name in SAME}, rel=1e-4, abs=1e-6
        )
        # Four rows of a prompt begin with its tokens, and trajectories of one prompt with each other's.
        assert other["actor/prefix_saving"] > 0.3
        assert other["critic/prefix_saving"] > 0.3
        assert not [name for name in one if name.endswith("prefix_saving")]
    for name, weight in plain.final_weights.items():
        torch.testing.assert_close(shared.final_weights[name], weight, rtol=0, atol=2e-5, msg=name)
