"""Loss aggregation by hand, and that it does not depend on how a batch is split."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos.masked_ops import LOSS_AGG_MODES, agg_loss, global_share
from verl.config import names

NAN = float("nan")
LOSSES = torch.tensor([[1.0, 2.0, 3.0, NAN], [5.0, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
BY_HAND = {
    "token-mean": (1 + 2 + 3 + 5) / 4,
    "token-sum": 1 + 2 + 3 + 5,
    "seq-mean-token-sum": ((1 + 2 + 3) + 5) / 2,  # the third row is filler and no sequence
    "seq-mean-token-mean": ((1 + 2 + 3) / 3 + 5) / 2,
    "seq-mean-token-sum-norm": ((1 + 2 + 3) / 10 + 5 / 10) / 2,
}


def test_the_modes_are_those_the_configuration_knows():
    assert LOSS_AGG_MODES == names.LOSS_AGG_MODES == tuple(BY_HAND)


@pytest.mark.parametrize("mode", BY_HAND)
def test_aggregation_by_hand(mode):
    assert agg_loss(LOSSES, MASK, mode, loss_scale_factor=10).item() == pytest.approx(BY_HAND[mode])


@pytest.mark.parametrize("mode", BY_HAND)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 8), max_size=3), ranks=st.sampled_from([1, 2, 4]))
def test_parts_with_global_counts_add_up_to_the_whole(mode, seed, cuts, ranks):
    rng = torch.Generator().manual_seed(seed)
    losses = torch.randn(8, 6, generator=rng, dtype=torch.float64)
    mask = (torch.rand(8, 6, generator=rng) < 0.5).long()
    counts = {"batch_num_tokens": mask.sum().item(), "global_batch_size": mask.any(-1).sum().item()}
    bounds = [0, *sorted(cuts), 8]
    parts = [(losses[a:b], mask[a:b]) for a, b in itertools.pairwise(bounds)]
    given_counts = [agg_loss(*part, mode, dp_size=ranks, loss_scale_factor=7, **counts) for part in parts]
    shares = [
        agg_loss(*part, mode, loss_scale_factor=7) * global_share(part[1], mode, *counts.values(), dp_size=ranks)
        for part in parts
    ]
    whole = agg_loss(losses, mask, mode, loss_scale_factor=7)
    # An engine that averages over `ranks` divides by it again.
    torch.testing.assert_close(sum(given_counts) / ranks, whole)
    torch.testing.assert_close(sum(shares) / ranks, whole)


@pytest.mark.parametrize("mode", BY_HAND)
def test_nothing_to_aggregate_is_zero_with_a_zero_gradient(mode):
    losses = LOSSES.clone().requires_grad_()
    loss = agg_loss(losses, torch.zeros_like(MASK), mode, loss_scale_factor=1)
    loss.backward()
    assert loss == 0
    assert not losses.grad.any()


def test_counts_may_be_tensors_and_the_dtype_of_the_loss_stays():
    loss = agg_loss(LOSSES.float(), MASK, "token-mean", batch_num_tokens=torch.tensor(8))
    assert loss == 11 / 8
    assert loss.dtype == torch.float32


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"(?s)loss_agg_mode.*'token-avg'"):
        agg_loss(LOSSES, MASK, "token-avg")
    with pytest.raises(ValueError, match=r"(?s)loss_agg_mode.*'token-avg'"):
        global_share(MASK, "token-avg", 1, 1)
    with pytest.raises(ValueError, match="loss_scale_factor"):
        agg_loss(LOSSES, MASK, "seq-mean-token-sum-norm")
