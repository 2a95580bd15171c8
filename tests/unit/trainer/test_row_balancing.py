"""Which rank gets which rows: mini-batches do not depend on the ranks, and loads are even inside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.trainer.ppo.row_balancing import balance_metrics, balance_rows, mini_batches_by_prompt, row_costs
from verl.utils.balancing import SequenceCost


def equal_runs(rows: int, minis: int) -> list[np.ndarray]:
    return np.split(np.arange(rows), minis)


@settings(max_examples=50)
@given(
    prompts=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    size=st.integers(1, 4),
    ranks=st.integers(1, 4),
    balance=st.booleans(),
)
def test_a_mini_batch_holds_the_same_rows_whatever_the_number_of_ranks(prompts, size, ranks, balance):
    """`prompts` are the rows of each; every row is sent once, besides fillers, which are of its own mini-batch."""
    uids = np.repeat([f"p{number}" for number in range(len(prompts))], prompts)
    minis = mini_batches_by_prompt(uids, size)
    assert np.concatenate(minis).tolist() == list(range(sum(prompts)))
    assert [len(set(uids[rows])) for rows in minis][:-1] == [size] * (len(minis) - 1)
    costs = np.random.default_rng(0).integers(1, 100, len(uids)).astype(float)
    balanced = balance_rows(costs, minis, ranks, balance)
    assert sum(balanced.sizes) * ranks == len(balanced.order)
    fillers = np.split(balanced.filler.reshape(ranks, -1), np.cumsum(balanced.sizes)[:-1], axis=1)
    for rows, here, filler in zip(minis, balanced.on_ranks(ranks), fillers, strict=True):
        assert sorted(here[~filler]) == rows.tolist()
        assert filler.sum() == -len(rows) % ranks
        assert set(costs[here[filler]]) <= {costs[rows].min()}, "the cheapest row fills up"
    sent = DataProto.from_dict({"row": torch.from_numpy(balanced.order)})
    assert balanced.restore_order(sent).batch["row"].tolist() == list(range(len(uids)))


def test_rows_of_a_prompt_need_not_stand_together():
    assert [rows.tolist() for rows in mini_batches_by_prompt(["b", "a", "b", "c"], 2)] == [[0, 1, 2], [3]]


def test_balancing_evens_out_tokens_over_ranks():
    costs = np.array([100, 1, 100, 1, 100, 1, 100, 1])
    (plain,) = balance_rows(costs, equal_runs(8, 1), 2, balance=False).on_ranks(2)
    (even,) = balance_rows(costs, equal_runs(8, 1), 2, balance=True).on_ranks(2)
    skewed = np.array([100, 100, 100, 100, 1, 1, 1, 1])
    (balanced,) = balance_rows(skewed, equal_runs(8, 1), 2, balance=True).on_ranks(2)
    assert costs[plain].sum(1).tolist() == [202, 202]
    assert costs[even].sum(1).tolist() == [202, 202]
    assert skewed[balanced].sum(1).tolist() == [202, 202]


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
    minis = equal_runs(8, 1)
    found = balance_metrics(by_cost, minis, balance_rows(by_cost, minis, 2, balance=True), 2)
    assert 1 <= found["global_seqlen/balanced_max_over_mean"] <= found["global_seqlen/max_over_mean"]
    plain = balance_metrics(by_tokens, minis, balance_rows(by_tokens, minis, 2, balance=False), 2)
    assert plain["global_seqlen/max_over_mean"] == pytest.approx(1100 / 750)


def test_evenness_is_taken_where_ranks_wait_for_each_other():
    """Over the whole step both ranks do 4; in every mini-batch one of them does 3 of 4."""
    costs = np.array([3.0, 1.0, 1.0, 3.0])
    two, one = equal_runs(4, 2), equal_runs(4, 1)
    found = balance_metrics(costs, two, balance_rows(costs, two, 2, balance=False), 2)
    assert found["global_seqlen/balanced_max_over_mean"] == pytest.approx(1.5)
    assert (
        balance_metrics(costs, one, balance_rows(costs, one, 2, balance=False), 2)["global_seqlen/max_over_mean"] == 1.0
    )
