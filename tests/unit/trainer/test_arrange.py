"""Which rank gets which rows: mini-batches do not depend on the ranks, and loads are even inside them."""

from __future__ import annotations

import numpy as np
import pytest

from verl.trainer.ppo.arrange import balanced_order, rank_major_order


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("balance", [False, True])
def test_a_mini_batch_holds_the_same_rows_whatever_the_number_of_ranks(dp_size, balance):
    costs = np.random.default_rng(0).integers(1, 100, 32)
    order = rank_major_order(costs, dp_size, mini_batches=4, balance=balance)
    assert sorted(order) == list(range(32))
    per_rank = order.reshape(dp_size, 4, -1)
    for mini in range(4):
        assert sorted(per_rank[:, mini].ravel()) == list(range(mini * 8, mini * 8 + 8))


def test_balancing_evens_out_tokens_over_ranks():
    costs = np.array([100, 1, 100, 1, 100, 1, 100, 1])
    plain = rank_major_order(costs, 2, mini_batches=1, balance=False).reshape(2, -1)
    even = rank_major_order(costs, 2, mini_batches=1, balance=True).reshape(2, -1)
    skewed = np.array([100, 100, 100, 100, 1, 1, 1, 1])
    balanced = rank_major_order(skewed, 2, mini_batches=1, balance=True).reshape(2, -1)
    assert costs[plain].sum(1).tolist() == [202, 202]
    assert costs[even].sum(1).tolist() == [202, 202]
    assert skewed[balanced].sum(1).tolist() == [202, 202]


def test_what_does_not_divide_is_refused_for_updates_and_left_alone_for_passes():
    with pytest.raises(ValueError, match="10 rows do not divide into 4 mini-batches over 2 ranks"):
        rank_major_order(np.ones(10, dtype=int), 2, 4, balance=True)
    assert balanced_order(np.ones(5, dtype=int), 2, balance=True).tolist() == [0, 1, 2, 3, 4]
