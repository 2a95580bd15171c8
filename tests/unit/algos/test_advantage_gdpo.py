"""GDPO by hand: each reward is normalised on its own before they are added."""

import math

import pytest
import torch

from verl.algos.advantage.gdpo import compute_gdpo_outcome_advantage
from verl.algos.advantage.grpo import compute_grpo_outcome_advantage

# Two prompts, two answers each; the columns are two rewards of very different size.
DIMENSIONS = torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0], [0.0, 0.0]], dtype=torch.float64)
UIDS = ["a", "a", "b", "b"]
MASK = torch.ones(4, 1)


def test_gdpo_by_hand():
    advantages, _ = compute_gdpo_outcome_advantage(
        DIMENSIONS.sum(-1, keepdim=True), MASK, UIDS, epsilon=0.0, reward_dimensions=DIMENSIONS
    )
    # In a pair the deviations are ±d/2 and the std of the sample is d/√2, so each reward gives ±1/√2 = ±0.7071.
    # a: 0.7071 - 0.7071 = 0 and -0.7071 + 0.7071 = 0;   b: 0.7071 + 0.7071 = √2 and -√2
    # over the batch: mean 0, std √((0 + 0 + 2 + 2) / 3) = 1.1547;   √2 / 1.1547 = 1.2247
    assert advantages[:, 0].tolist() == pytest.approx([0.0, 0.0, math.sqrt(1.5), -math.sqrt(1.5)], abs=1e-12)


def test_weights_let_one_reward_matter_more():
    advantages, _ = compute_gdpo_outcome_advantage(
        DIMENSIONS.sum(-1, keepdim=True), MASK, UIDS, 0.0, DIMENSIONS, reward_weights=[1.0, 0.0]
    )
    # only the first reward: ±0.7071 in both groups; over the batch std √(4 · 0.5 / 3) = 0.8165
    one = math.sqrt(0.5) / math.sqrt(2 / 3)
    assert advantages[:, 0].tolist() == pytest.approx([one, -one, one, -one])
    with pytest.raises(ValueError, match=r"reward_weights"):
        compute_gdpo_outcome_advantage(MASK, MASK, UIDS, reward_dimensions=DIMENSIONS, reward_weights=[1.0])


def test_one_reward_is_grpo_normalised_over_the_batch():
    rewards = torch.tensor([[1.0], [0.0], [3.0], [1.0]], dtype=torch.float64)
    grpo = compute_grpo_outcome_advantage(rewards, MASK, UIDS)[0][:, 0]
    gdpo = compute_gdpo_outcome_advantage(rewards, MASK, UIDS)[0][:, 0]
    assert gdpo.tolist() == pytest.approx(((grpo - grpo.mean()) / (grpo.std() + 1e-6)).tolist())
