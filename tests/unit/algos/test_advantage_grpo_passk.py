"""GRPO for pass@k by hand: only the single best answer is rewarded, with its lead over the runner-up."""

import math

import pytest
import torch

from verl.algos.advantage.grpo_passk import compute_grpo_passk_outcome_advantage

UIDS = ["a", "b", "a", "b", "a", "b"]
REWARDS = torch.tensor([[0.2], [1.0], [0.9], [1.0], [0.5], [0.0]], dtype=torch.float64)
MASK = torch.ones(6, 1)


def test_grpo_passk_by_hand():
    advantages, _ = compute_grpo_passk_outcome_advantage(REWARDS, MASK, UIDS, norm_adv_by_std_in_grpo=False)
    # Group a: 0.9 leads 0.5 by 0.4. Group b: two answers share the best score, so neither adds anything.
    assert advantages[:, 0].tolist() == pytest.approx([0.0, 0.0, 0.4, 0.0, 0.0, 0.0])


def test_grpo_passk_with_std_by_hand():
    advantages, _ = compute_grpo_passk_outcome_advantage(REWARDS, MASK, UIDS, epsilon=0.0)
    mean = (0.2 + 0.9 + 0.5) / 3
    std = math.sqrt(((0.2 - mean) ** 2 + (0.9 - mean) ** 2 + (0.5 - mean) ** 2) / 2)
    assert advantages[2, 0].item() == pytest.approx(0.4 / std)


def test_a_lone_answer_leads_nobody():
    advantages, _ = compute_grpo_passk_outcome_advantage(REWARDS[:1], MASK[:1], ["a"])
    assert advantages.tolist() == [[0.0]]
