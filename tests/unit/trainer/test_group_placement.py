"""Rows of a prompt are placed on one rank if that lowers the cost of the busiest rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainer.test_row_balancing import batch_of
from verl.trainer.ppo.row_balancing import SharedCosts, balance_metrics, balance_rows, place_groups, shared_costs
from verl.utils.balancing import COST_PER_TOKEN, SequenceCost, get_seqlen_balanced_partitions


def grouped(sizes, prompt=10.0, response=2.0):
    rows = sum(sizes)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return SharedCosts(np.full(rows, prompt + response), np.full(rows, prompt), groups)


def busiest(shared, parts):
    return max(shared.total(np.array(part)) for part in parts)


def test_a_rank_computes_the_prompt_of_a_group_once():
    shared = grouped([3, 2])
    assert shared.total(np.array([0, 1, 2])) == 10 + 3 * 2
    assert shared.total(np.array([0, 3])) == 2 * 12
    assert shared.total(np.arange(5)) == 2 * 10 + 5 * 2


def test_whole_groups_go_to_one_rank():
    parts = place_groups(grouped([4, 4, 4, 4]), 2)
    assert sorted(len(part) for part in parts) == [8, 8]
    groups = [{row // 4 for row in part} for part in parts]
    assert [len(here) for here in groups] == [2, 2]


def test_one_group_of_expensive_responses_is_split_for_balance():
    """Whole groups would leave one rank with four long responses; single rows are cheaper."""
    costs = np.array([101.0, 101, 101, 101, 2, 2, 2, 2])
    shared = SharedCosts(costs, np.ones(8), np.repeat([0, 1], 4))
    parts = place_groups(shared, 2)
    assert busiest(shared, parts) == pytest.approx(2 * 100 + 1 + 2 * 1 + 1)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8), ranks=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_row_is_placed_once_in_equal_numbers_and_never_worse_than_row_by_row(sizes, ranks, seed):
    sizes = [*sizes, *([-sum(sizes) % ranks] if sum(sizes) % ranks else [])]
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    saved = random.integers(1, 50, len(sizes))[groups].astype(float)
    shared = SharedCosts(saved + random.integers(1, 50, len(groups)), saved, groups)
    parts = place_groups(shared, ranks)
    assert sorted(row for part in parts for row in part) == list(range(len(groups)))
    assert {len(part) for part in parts} == {len(groups) // ranks}
    by_row = get_seqlen_balanced_partitions(shared.costs.tolist(), ranks, equal_size=True)
    assert busiest(shared, parts) <= busiest(shared, by_row) + 1e-9


def test_estimates_come_from_prompts_and_trajectories():
    cost = SequenceCost(token=2.0, head=0.0, pair=0.0)
    prompts = np.array([5, 5, 5, 9, 3])
    uids = np.array(["a", "a", "a", "a", "b"])
    # The fourth row is the second of the trajectory of the third.
    shared = SharedCosts.estimate(np.full(5, 40.0), cost, prompts, uids, np.array([0, 1, 2, 2, 3]))
    assert shared.saved.tolist() == [10, 10, 10, 10, 6]
    longer = SharedCosts.estimate(np.full(5, 40.0), cost, prompts, uids, np.array([0, 1, 3, 2, 2]))
    assert longer.saved.tolist() == [10, 10, 10, 10, 6]


def test_mini_batches_keep_their_rows_and_fillers_stay_beside_their_row():
    batch = batch_of([6] * 9, [2, 1, 2, 1, 1, 2, 2, 1, 2])
    uids = np.repeat(["a", "b", "c"], 3)
    costs = COST_PER_TOKEN(np.array([8, 7, 8, 7, 7, 8, 8, 7, 8]))
    shared = shared_costs(batch, costs, COST_PER_TOKEN, uids)
    assert shared.saved.tolist() == [6] * 9
    minis = [np.arange(6), np.arange(6, 9)]
    balanced = balance_rows(costs, minis, 2, True, shared)
    first, second = balanced.on_ranks(2)
    assert [sorted(rows) for rows in first] in ([[0, 1, 2], [3, 4, 5]], [[3, 4, 5], [0, 1, 2]])
    assert sorted(set(second.ravel())) == [6, 7, 8]
    assert balanced.filler.sum() == 1
    metrics = balance_metrics(costs, minis, balanced, 2, shared)
    assert 1.0 <= metrics["global_seqlen/balanced_max_over_mean"] < 1.3


def test_prompts_that_are_short_beside_their_responses_are_not_kept_together():
    batch = batch_of([1] * 4, [8] * 4)
    uids = np.repeat(["a", "b"], 2)
    assert shared_costs(batch, COST_PER_TOKEN(np.full(4, 9)), COST_PER_TOKEN, uids) is None
