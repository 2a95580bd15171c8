"""No key without an effect: each key of `algorithm.*` and of the actor's loss changes what training computes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.support.training_harness import make_task, make_trainer, overrides
from verl.config import ActorConfig, AlgorithmConfig, as_config, names
from verl.config.schema import walk
from verl.protocol import DataProto, object_array
from verl.workers.engine.base import Counts
from verl.workers.roles.policy_loss import PolicyLoss

TESTS = Path(__file__).parents[2]
KL = ("algorithm.use_kl_in_reward=True",)
STEERED = (*KL, "algorithm.kl_ctrl.type=adaptive")
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2")
GDPO = ("algorithm.adv_estimator=gdpo", "actor_rollout_ref.rollout.n=2", "algorithm.gdpo.reward_keys=[score,length]")
MASKED = ("algorithm.rollout_correction.rollout_rs=token",)
CUT_OFF = ("actor_rollout_ref.rollout.top_k=5", "algorithm.rollout_correction.rollout_is=token")
# key → (what it needs to matter, two values that must differ)
ALGORITHM = {
    "adv_estimator": ((), "gae", "reinforce_plus_plus"),
    "gamma": ((), "1.0", "0.5"),
    "lam": ((), "1.0", "0.5"),
    "norm_adv_by_std_in_grpo": (GRPO, "True", "False"),
    "truncated_responses": ((), "keep", "mask"),
    "use_kl_in_reward": ((), "True", "False"),
    "kl_penalty": (KL, "kl", "low_var_kl"),
    "kl_ctrl.type": (KL, "fixed", "adaptive"),
    "kl_ctrl.kl_coef": (KL, "0.1", "0.2"),
    "kl_ctrl.target_kl": (STEERED, "0.1", "10.0"),
    "kl_ctrl.horizon": (STEERED, "100", "1000"),
    "gdpo.reward_keys": (GDPO, "[score]", "[score,length]"),
    "gdpo.reward_weights": (GDPO, "[]", "[1.0,3.0]"),
    "rollout_correction.rollout_is": ((), "token", "sequence"),
    "rollout_correction.rollout_is_threshold": (("algorithm.rollout_correction.rollout_is=token",), "1.1", "2.0"),
    "rollout_correction.rollout_is_batch_normalize": (
        ("algorithm.rollout_correction.rollout_is=token",),
        "True",
        "False",
    ),
    "rollout_correction.rollout_rs": (("algorithm.rollout_correction.rollout_rs_threshold=1.1",), "null", "token"),
    "rollout_correction.rollout_rs_threshold": (MASKED, "1.1", "4.0"),
    "rollout_correction.rollout_rs_threshold_lower": (MASKED, "0.1", "0.99"),
    "rollout_correction.denominator": (CUT_OFF, "full", "drawn"),
    "rollout_correction.warn_log_prob_diff": ((), "0.01", "10.0"),
}
# Keys that act on a whole run: the file in which a run shows it.
IN_A_RUN = {
    "filter_groups.enable": "e2e/test_training_dapo.py",
    "filter_groups.metric": "e2e/test_training_dapo.py",
    "filter_groups.max_num_gen_batches": "unit/trainer/test_dynamic_sampling.py",
    "rollout_correction.bypass_mode": "e2e/test_training_dapo.py",
    "rollout_correction.loss_type": "e2e/test_training_dapo.py",
}
# The search agent's; its tests are with it.
OTHERS = {"state_masking.start_state_marker", "state_masking.end_state_marker"}

REF = {"use_kl_loss": True}
LOSS = {
    "clip_ratio": ({}, 0.1, 0.3),
    "clip_ratio_low": ({}, 0.1, 0.3),
    "clip_ratio_high": ({}, 0.1, 0.3),
    "clip_ratio_c": ({}, 1.2, 3.0),
    "loss_agg_mode": ({}, "token-mean", "seq-mean-token-mean"),
    "loss_scale_factor": ({"loss_agg_mode": "seq-mean-token-sum-norm"}, 5.0, 10.0),
    "entropy_coeff": ({}, 0.0, 0.01),
    "use_kl_loss": ({}, False, True),
    "kl_loss_coef": (REF, 0.1, 0.2),
    "kl_loss_type": (REF, "kl", "low_var_kl"),
    "policy_loss.loss_mode": ({}, "vanilla", "cispo"),
    "policy_loss.clip_cov_ratio": ({"policy_loss.loss_mode": "clip_cov", "policy_loss.clip_cov_lb": 0.0}, 0.1, 0.9),
    "policy_loss.clip_cov_lb": ({"policy_loss.loss_mode": "clip_cov", "policy_loss.clip_cov_ratio": 1.0}, 0.0, 1.0),
    "policy_loss.clip_cov_ub": ({"policy_loss.loss_mode": "clip_cov", "policy_loss.clip_cov_ratio": 1.0}, 1.0, 9.0),
    "policy_loss.kl_cov_ratio": ({"policy_loss.loss_mode": "kl_cov"}, 0.1, 0.9),
    "policy_loss.ppo_kl_coef": ({"policy_loss.loss_mode": "kl_cov", "policy_loss.kl_cov_ratio": 0.5}, 1.0, 2.0),
    "policy_loss.tau_pos": ({"policy_loss.loss_mode": "sapo"}, 1.0, 2.0),
    "policy_loss.tau_neg": ({"policy_loss.loss_mode": "sapo"}, 1.0, 2.0),
}


def leaves(block: type) -> set[str]:
    return {path for path, entry in walk(block) if entry.block is None}


def test_every_key_of_the_algorithm_is_in_a_table():
    assert leaves(AlgorithmConfig) == {*ALGORITHM, *IN_A_RUN, *OTHERS}


def test_every_key_of_the_loss_is_in_a_table():
    of_the_loss = {name for name in leaves(ActorConfig) if name.startswith(("policy_loss.", "clip_", "kl_", "loss_"))}
    assert of_the_loss | {"entropy_coeff", "use_kl_loss"} == set(LOSS)


@pytest.mark.parametrize(("key", "file"), IN_A_RUN.items())
def test_a_key_that_needs_a_run_is_tested_in_one(key, file):
    assert f"algorithm.{key}" in (TESTS / file).read_text()


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"), rows=8)


def answered() -> DataProto:
    """Two answers to each of two prompts, as they stand before the advantages; rewards on every token."""
    torch.manual_seed(0)
    draw = lambda: 0.3 * torch.randn(4, 5)  # noqa: E731
    old = -1.0 - draw().abs()
    rollout = old + draw()
    mask = (torch.arange(5) < torch.tensor([5, 3, 4, 2])[:, None]).long()
    batch = DataProto.from_dict(
        {
            "responses": torch.ones(4, 5, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.long), mask], dim=1),
            "response_mask": mask,
            "token_level_scores": torch.randn(4, 5),
            "old_log_probs": old,
            "rollout_log_probs": rollout,
            "rollout_drawn_log_probs": rollout + 0.1,
            "ref_log_prob": old + draw(),
            "values": draw(),
        }
    )
    batch.non_tensor_batch |= {
        "uid": object_array(["a", "a", "b", "b"]),
        "length": object_array([5, 3, 4, 2]),
        "finish_reason": object_array(["length", "stop", "stop", "stop"]),
    }
    return batch


def outcome(caplog, task: dict[str, str], folder: Path, *settings: str) -> tuple:
    """All that the trainer computes between the log-probs and the updates, and what it says of the rollout."""
    caplog.clear()
    trainer = make_trainer(overrides(task, folder, *settings))
    metrics: dict[str, float] = {}
    batch = trainer._compute_advantage(answered(), metrics)
    trainer.reward_fn.close()
    columns = {name: batch.batch[name].tolist() for name in sorted(batch.batch.keys())}
    return (
        columns,
        trainer.kl_ctrl_in_reward.value,
        [text for name, _, text in caplog.record_tuples if name.endswith("ppo.advantage")],
    )


@pytest.mark.parametrize("key", ALGORITHM)
def test_a_key_of_the_algorithm_has_an_effect(caplog, task, tmp_path, key):
    needs, one, other = ALGORITHM[key]
    first, second = (outcome(caplog, task, tmp_path, *needs, f"algorithm.{key}={value}") for value in (one, other))
    assert first != second
    assert first == outcome(caplog, task, tmp_path, *needs, f"algorithm.{key}={one}"), (
        "and nothing else made the difference"
    )


def test_every_kind_of_kl_in_the_reward_is_another(caplog, task, tmp_path):
    kinds = ("kl", "abs", "mse", "low_var_kl")
    found = [
        outcome(caplog, task, tmp_path, *KL, f"algorithm.kl_penalty={kind}")[0]["token_level_rewards"] for kind in kinds
    ]
    assert all(found.count(rewards) == 1 for rewards in found)


def loss_of(**settings) -> list[float]:
    """The actor's loss and its gradient for one mini-batch that has moved away from the old policy."""
    nested: dict = {"policy_loss": {}}
    for key, value in settings.items():
        block, _, name = key.rpartition(".")
        (nested[block] if block else nested)[name] = value
    config = as_config(ActorConfig, nested)
    torch.manual_seed(1)
    old = -1.0 - torch.randn(6, 8).abs()
    data = DataProto.from_dict(
        {
            "old_log_probs": old,
            "ref_log_prob": old + 0.5 * torch.randn(6, 8),
            "advantages": 2.0 * torch.randn(6, 8),
            "response_mask": (torch.arange(8) < torch.tensor([8, 5, 3, 8, 1, 6])[:, None]).long(),
        }
    )
    log_probs = (old + 0.5 * torch.randn(6, 8)).requires_grad_()
    output = {"log_probs": log_probs, "entropy": torch.rand(6, 8)}
    torch.manual_seed(2)  # clip_cov draws lots
    loss, _ = PolicyLoss(config)(output, data, Counts(tokens=31, sequences=6))
    loss.backward()
    return [loss.item(), *log_probs.grad.flatten().tolist()]


@pytest.mark.parametrize("key", LOSS)
def test_a_key_of_the_loss_has_an_effect(key):
    needs, one, other = LOSS[key]
    settings = copy.deepcopy(needs)
    assert loss_of(**settings, **{key: one}) != loss_of(**settings, **{key: other})
    assert loss_of(**settings, **{key: one}) == loss_of(**settings, **{key: one})


def test_every_policy_loss_is_another():
    selecting = {"policy_loss.clip_cov_ratio": 0.5, "policy_loss.clip_cov_lb": 0.0, "policy_loss.kl_cov_ratio": 0.5}
    found = [loss_of(**selecting, **{"policy_loss.loss_mode": name}) for name in names.POLICY_LOSSES]
    assert all(found.count(result) == 1 for result in found)


def test_every_aggregation_is_another():
    found = [loss_of(loss_agg_mode=mode, loss_scale_factor=7.0)[0] for mode in names.LOSS_AGG_MODES]
    assert len(set(found)) == len(names.LOSS_AGG_MODES)


def test_every_kl_loss_has_its_own_value_and_the_plus_its_own_gradient():
    """Aliases (kl = kl+, k2 = mse, k3 = low_var_kl) agree; a trailing + keeps the value and changes the gradient."""
    base = loss_of()
    added = {}
    for kind in names.KL_LOSS_TYPES:
        result = loss_of(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind)
        added[kind] = torch.tensor(result) - torch.tensor(base)
    for one, other in (("kl", "kl+"), ("k2", "mse"), ("k3", "low_var_kl"), ("k1+", "kl+"), ("k3+", "low_var_kl+")):
        torch.testing.assert_close(added[one], added[other])
    for kind in ("k1", "abs", "low_var_kl"):
        torch.testing.assert_close(added[f"{kind}+"][0], added[kind][0])
        assert not torch.allclose(added[f"{kind}+"][1:], added[kind][1:])
        torch.testing.assert_close(added[f"{kind}+"][1:], added["mse"][1:])
    values = {round(added[kind][0].item(), 6) for kind in ("kl", "abs", "mse", "low_var_kl")}
    assert len(values) == 4
