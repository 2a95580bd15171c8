"""Returns carried through observations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos.returns import discounted_returns


def test_returns_by_hand():
    rewards = torch.tensor([[1.0, 50.0, 2.0, 4.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1]])
    # 4;   2 + 0.5 · 4 = 4;   the observation takes no step;   1 + 0.5 · 4 = 3
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 4.0, 4.0]]
    assert discounted_returns(rewards, mask, 1.0).tolist() == [[7.0, 0.0, 6.0, 4.0]]
    assert discounted_returns(rewards, mask, 0.0).tolist() == [[1.0, 0.0, 2.0, 4.0]]


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_the_scan_equals_the_sum_over_the_future(seed, gamma):
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.randn(4, 7, generator=rng, dtype=torch.float64)
    mask = torch.rand(4, 7, generator=rng) < 0.6
    expected = torch.zeros(4, 7, dtype=torch.float64)
    for row in range(4):
        own = mask[row].nonzero().flatten().tolist()
        for at, start in enumerate(own):
            expected[row, start] = sum(rewards[row, t] * gamma**k for k, t in enumerate(own[at:]))
    assert discounted_returns(rewards, mask, gamma).tolist() == [pytest.approx(row) for row in expected.tolist()]


@pytest.mark.parametrize("width", [0, 1])
def test_responses_of_no_or_one_token(width):
    rewards, mask = torch.ones(2, width), torch.ones(2, width)
    assert discounted_returns(rewards, mask, 0.5).tolist() == rewards.tolist()
