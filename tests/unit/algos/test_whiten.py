"""Whitening in place equals the shared function that copies."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos.whiten import whiten_
from verl.utils.torch_functional import masked_whiten


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
