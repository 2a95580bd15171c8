"""Returns that skip observations, and whitening."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos.masked_ops import discounted_returns, whiten_
from verl.utils.torch_functional import masked_whiten


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


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_the_result_is_that_of_masked_whiten(seed, share):
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 4, generator=rng) < share
    values = torch.randn(3, 4, generator=rng, dtype=torch.float64).masked_fill(~mask, 0.0)
    torch.testing.assert_close(whiten_(values.clone(), mask), masked_whiten(values, mask))


def test_a_mean_far_above_the_spread_keeps_its_digits():
    values = torch.tensor([[100.0, 100.02, 100.03]])
    expected = (values.double() - values.double().mean()) / values.double().std()
    whitened = whiten_(values, torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(whitened.double(), expected, rtol=1e-3, atol=1e-3)
