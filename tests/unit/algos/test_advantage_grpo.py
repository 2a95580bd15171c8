"""GRPO by hand: the worked example users know, with and without the standard deviation."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.algos.advantage.grpo import compute_grpo_outcome_advantage
from verl.config import AlgorithmConfig, as_config

REWARDS = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
MASK = torch.ones(4, 2)
UIDS = np.array(["prompt"] * 4, dtype=object)


def test_grpo_without_std_by_hand():
    advantages, returns = compute_grpo_outcome_advantage(REWARDS, MASK, UIDS, norm_adv_by_std_in_grpo=False)
    # mean (1 + 0 + 1 + 0) / 4 = 0.5
    assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5], [0.5, 0.5], [-0.5, -0.5]]
    assert torch.equal(returns, advantages)


def test_grpo_with_std_by_hand():
    advantages, _ = compute_grpo_outcome_advantage(REWARDS, MASK, UIDS)
    # std of the sample: √(4 · 0.5² / 3) = 0.57735, and 0.5 / 0.57735 = 0.866
    assert advantages[:, 0].tolist() == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        {"norm_adv_by_std_in_grpo": False},
        OmegaConf.create({"norm_adv_by_std_in_grpo": False}),
        as_config(AlgorithmConfig, {"norm_adv_by_std_in_grpo": False}),
    ],
    ids=["dict", "DictConfig", "dataclass"],
)
def test_the_configuration_turns_the_std_off_and_an_argument_comes_before_it(config):
    from_config, _ = compute_grpo_outcome_advantage(REWARDS, MASK, UIDS, config=config)
    assert from_config[0, 0] == 0.5
    argument, _ = compute_grpo_outcome_advantage(REWARDS, MASK, UIDS, norm_adv_by_std_in_grpo=True, config=config)
    assert argument[0, 0] == pytest.approx(0.866, abs=1e-3)


def test_one_answer_alone_has_no_advantage():
    advantages, _ = compute_grpo_outcome_advantage(REWARDS, MASK, np.array(list("abcd"), dtype=object))
    assert advantages.abs().max() == 0
