"""Which rank gets which rows: mini-batches do not depend on the ranks, and loads are even inside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.arrange import balanced_order, evenness, rank_major_order, row_costs
from verl.utils.flops import SequenceCost


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


def batch_of(prompts: list[int], answers: list[int], width: int = 8) -> DataProto:
    """Rows of so many tokens on either side, padded to `width` on each."""
    mask = torch.zeros(len(prompts), 2 * width, dtype=torch.long)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        mask[row, width - prompt : width + answer] = 1
    return DataProto.from_dict({"attention_mask": mask, "responses": mask[:, width:]})


def test_a_row_costs_its_tokens_its_answer_and_its_attention():
    cost = SequenceCost(token=10.0, head=3.0, pair=1.0)
    assert row_costs(batch_of([2, 5], [1, 8]), cost).tolist() == [3 * 10 + 1 * 3 + 9, 13 * 10 + 8 * 3 + 169]
    assert row_costs(batch_of([2, 5], [1, 8])).tolist() == [3, 13], "without a shape, tokens"


def test_balancing_by_cost_does_not_put_the_long_rows_on_one_rank():
    """As many tokens as the eight short rows have, the long one has 16 times the attention: it stands nearly alone."""
    lengths = np.array([800, 100, 100, 100, 100, 100, 100, 100])
    by_tokens, by_cost = (SequenceCost(1.0, 0.0, pair)(lengths) for pair in (0.0, 1.0))
    order = rank_major_order(by_cost, 2, mini_batches=1, balance=True)
    found = evenness(by_cost, order, 2, 1)
    assert 1 <= found["global_seqlen/balanced_max_over_mean"] <= found["global_seqlen/max_over_mean"]
    assert evenness(by_tokens, np.arange(8), 2, 1)["global_seqlen/max_over_mean"] == pytest.approx(1100 / 750)


def test_evenness_is_taken_where_ranks_wait_for_each_other():
    """Over the whole step both ranks do 4; in every mini-batch one of them does 3 of 4."""
    costs = np.array([3.0, 1.0, 1.0, 3.0])
    order = rank_major_order(costs, 2, mini_batches=2, balance=False)
    assert evenness(costs, order, 2, 2)["global_seqlen/balanced_max_over_mean"] == pytest.approx(1.5)
    assert evenness(costs, order, 2, 1)["global_seqlen/max_over_mean"] == 1.0
