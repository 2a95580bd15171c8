"""GPG by hand: groups that teach nothing scale the others up."""

import pytest
import torch

from verl.algos.advantage.gpg import compute_gpg_outcome_advantage

REWARDS = torch.tensor([[1.0], [0.0], [1.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
UIDS = ["mixed", "mixed", "right", "right", "wrong", "wrong"]


def test_gpg_by_hand():
    advantages, _ = compute_gpg_outcome_advantage(REWARDS, torch.ones(6, 1), UIDS)
    # Two of six answers are in a group whose scores differ: α = 6 / 2 = 3, and 3 · (1 - 0.5) = 1.5
    assert advantages[:, 0].tolist() == pytest.approx([1.5, -1.5, 0.0, 0.0, 0.0, 0.0])


def test_f_norm_divides():
    advantages, _ = compute_gpg_outcome_advantage(REWARDS, torch.ones(6, 1), UIDS, f_norm=2.0)
    assert advantages[:2, 0].tolist() == pytest.approx([0.75, -0.75])


def test_when_no_group_teaches_anything_all_is_zero():
    advantages, _ = compute_gpg_outcome_advantage(REWARDS[2:], torch.ones(4, 1), UIDS[2:])
    assert advantages.abs().max() == 0
