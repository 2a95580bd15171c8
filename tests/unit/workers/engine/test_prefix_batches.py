"""Micro-batches of rows with common prefixes: every row once, within the budget, at the lowest cost."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.prefix_cases import BATCHES, computed_tokens, shared_batch
from verl.protocol import DataProto
from verl.utils.balancing import COST_PER_TOKEN, SequenceCost
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.micro_batches import SET_COLUMN, micro_batches
from verl.workers.engine.common.prefix_sharing import (
    BatchPrefixTree,
    PrefixSharing,
    build_prefix_tree,
    shared_micro_batch_rows,
)

QUADRATIC = SequenceCost(token=3.0, head=0.0, pair=0.5)


@st.composite
def prefixes_of(draw, most=9):
    lengths, shared = [draw(st.integers(1, 12))], [0]
    for _ in range(draw(st.integers(0, most - 1))):
        shared.append(draw(st.integers(0, lengths[-1])))
        lengths.append(max(1, shared[-1] + draw(st.integers(0, 6))))
    order = draw(st.permutations(range(len(lengths))))
    return BatchPrefixTree(np.array(order), np.array(shared), np.array(lengths))


def range_sum(values, shared, first, end):
    return values[first] + sum(values[i] - shared[i] for i in range(first + 1, end))


def group(prompt, response, answers, first_row=0):
    lengths, shared = [prompt + response] * answers, [0] + [prompt] * (answers - 1)
    return lengths, shared


def test_whole_groups_are_kept_together_if_they_fit():
    """Three groups of 10 + 3 * 2 computed tokens; two of them fit into 32."""
    lengths, shared = (3 * part for part in group(10, 2, 3))
    rows = BatchPrefixTree(np.arange(9), np.array(shared), np.array(lengths))
    assert shared_micro_batch_rows(rows, MicroBatching(max_tokens=32), COST_PER_TOKEN) == [
        [3, 4, 5, 6, 7, 8],
        [0, 1, 2],
    ]
    assert shared_micro_batch_rows(rows, MicroBatching(max_tokens=16), COST_PER_TOKEN) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]


@pytest.mark.parametrize(("prompt", "micro_batches"), [(500, 2), (4096, 3)])
def test_a_long_prompt_is_not_repeated_to_save_a_micro_batch(prompt, micro_batches):
    """Three groups of four responses fit into two micro-batches if the second group is split."""
    lengths, shared = (3 * part for part in group(prompt, 100, 4))
    rows = BatchPrefixTree(np.arange(12), np.array(shared), np.array(lengths))
    budget = (3 * (prompt + 400) + prompt) // 2
    parts = shared_micro_batch_rows(rows, MicroBatching(max_tokens=budget), COST_PER_TOKEN)
    assert len(parts) == micro_batches


def test_a_group_over_the_budget_is_split_evenly_and_repeats_its_prompt():
    lengths, shared = group(10, 4, 6)
    rows = BatchPrefixTree(np.arange(6), np.array(shared), np.array(lengths))
    assert shared_micro_batch_rows(rows, MicroBatching(max_tokens=26), COST_PER_TOKEN) == [[0, 1, 2], [3, 4, 5]]


def test_response_tokens_of_a_micro_batch_are_within_the_budget_too():
    """Equal responses are computed once, but heads and losses process those of every row."""
    same = DataProto.from_dict(
        {
            "input_ids": torch.arange(1, 11).expand(8, 10),
            "attention_mask": torch.ones(8, 10, dtype=torch.long),
            "responses": torch.arange(5, 11).expand(8, 6),
        }
    )
    prefixes = build_prefix_tree(same)
    parts = shared_micro_batch_rows(prefixes, MicroBatching(max_tokens=25), COST_PER_TOKEN)
    assert sorted(len(part) for part in parts) == [4, 4]
    same.batch[SET_COLUMN] = torch.arange(8)
    parts = [rows for _, rows in micro_batches(same, MicroBatching(max_tokens=25), COST_PER_TOKEN, int, prefixes)]
    assert max(len(rows) for rows in parts) <= 4


@settings(max_examples=150, deadline=None)
@given(rows=prefixes_of(), budget=st.integers(1, 40), at_least=st.integers(1, 4), quadratic=st.booleans())
def test_every_row_occurs_once_within_the_budget_in_descending_cost(rows, budget, at_least, quadratic):
    cost = QUADRATIC if quadratic else COST_PER_TOKEN
    parts = shared_micro_batch_rows(rows, MicroBatching(max_tokens=budget), cost, at_least)
    assert sorted(row for part in parts for row in part) == list(range(len(rows.order)))
    assert len(parts) >= min(at_least, len(rows.order))
    place = {row: at for at, row in enumerate(rows.order.tolist())}
    full, shared = cost(rows.lengths), cost(rows.shared)
    costs = []
    for part in parts:
        places = [place[row] for row in part]
        first, end = places[0], places[-1] + 1
        assert places == list(range(first, end))
        costs.append(range_sum(full, shared, first, end))
        if len(part) > 1:
            assert range_sum(rows.lengths, rows.shared, first, end) <= budget
    assert costs == sorted(costs, reverse=True)


@settings(max_examples=100, deadline=None)
@given(rows=prefixes_of(most=7), budget=st.integers(4, 40))
def test_the_split_is_the_cheapest_of_all_ranges(rows, budget):
    """By enumeration: no split has fewer ranges, and none with as few has a total that is more than 1 % smaller."""
    count, full, shared = len(rows.order), QUADRATIC(rows.lengths), QUADRATIC(rows.shared)

    def totals(parts):
        for inner in combinations(range(1, count), parts - 1):
            ranges = list(pairwise([0, *inner, count]))
            sizes = [range_sum(rows.lengths, rows.shared, *part) for part in ranges]
            if all(size <= budget or end - first == 1 for size, (first, end) in zip(sizes, ranges, strict=True)):
                yield sum(range_sum(full, shared, *part) for part in ranges)

    parts = shared_micro_batch_rows(rows, MicroBatching(max_tokens=budget), QUADRATIC)
    place = {row: at for at, row in enumerate(rows.order.tolist())}
    costs = [range_sum(full, shared, place[part[0]], place[part[-1]] + 1) for part in parts]
    fewest = next(n for n in range(1, count + 1) if any(True for _ in totals(n)))
    assert len(parts) == fewest
    assert sum(costs) <= min(totals(fewest)) + 0.01 * range_sum(full, shared, 0, count) + 1e-6


def test_single_rows_are_balanced_by_cost_where_nothing_is_lost():
    """Eight rows of 10 tokens within 50 tokens: 4 + 4, not 5 + 3."""
    rows = BatchPrefixTree(np.arange(8), np.zeros(8, dtype=np.int64), np.full(8, 10))
    parts = shared_micro_batch_rows(rows, MicroBatching(max_tokens=50), COST_PER_TOKEN)
    assert [len(part) for part in parts] == [4, 4]
    assert [len(part) for part in shared_micro_batch_rows(rows, MicroBatching(size=3), COST_PER_TOKEN)] == [3, 3, 2]


def test_saving_counts_the_distinct_prefixes():
    for name in BATCHES:
        data = shared_batch(name)
        tokens = int(data.batch["attention_mask"].sum())
        assert tokens * (1 - build_prefix_tree(data).saving) == pytest.approx(computed_tokens(name))
    assert build_prefix_tree(data[:0]).saving == 0


def test_auto_needs_a_tenth_and_true_any_shared_token():
    ids = torch.arange(1, 22).view(3, 7)
    data = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    auto, always, never = (PrefixSharing(mode, COST_PER_TOKEN) for mode in ("auto", "true", "false"))
    assert always.begin(data) is None
    ids[1, :2] = ids[0, :2]
    assert always.begin(data).saving == pytest.approx(2 / 21)
    assert auto.begin(data) is None
    assert never.begin(data) is None
    ids[2, 0] = ids[0, 0]
    assert auto.begin(data).saving == pytest.approx(3 / 21)


def test_sets_of_rows_stay_together_and_count_what_they_compute():
    """Pairs of 6 tokens of which 4 are shared: 8 computed tokens each instead of 12."""
    ids = torch.tensor([[n, 2, 3, 4, 5, side] for n in (7, 8, 9) for side in (1, 2)])
    ids[1::2, 4] = 6
    data = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    data.batch[SET_COLUMN] = torch.tensor([0, 0, 1, 1, 2, 2])
    micro = MicroBatching(max_tokens=16)
    for mode, expected in (("true", [4, 2]), ("false", [2, 2, 2])):
        prefixes = PrefixSharing(mode, COST_PER_TOKEN).begin(data)
        parts = [rows for _, rows in micro_batches(data, micro, COST_PER_TOKEN, lambda count: count, prefixes)]
        assert [len(rows) for rows in parts] == expected
        assert all({row ^ 1 for row in rows} == set(rows) for rows in parts)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(
        st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=6), min_size=1, max_size=6), min_size=1, max_size=4
    ),
    limit=st.integers(1, 20),
    by_tokens=st.booleans(),
)
def test_all_ranks_have_as_many_micro_batches_also_if_only_some_share(ranks, limit, by_tokens):
    micro = MicroBatching(max_tokens=limit) if by_tokens else MicroBatching(size=limit)

    def split(rows, maximum):
        ids = torch.tensor([row + [9] * (6 - len(row)) for row in rows])
        mask = (torch.arange(6) < torch.tensor([[len(row)] for row in rows])).long()
        data = DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "responses": ids[:, 1:]})
        prefixes = PrefixSharing("auto", COST_PER_TOKEN).begin(data)
        return [rows for _, rows in micro_batches(data, micro, COST_PER_TOKEN, maximum, prefixes)]

    most = max(len(split(rows, int)) for rows in ranks)
    for rows in ranks:
        parts = split(rows, lambda count: most)
        assert len(parts) == most
        assert sorted(row for part in parts for row in part or ()) == list(range(len(rows)))
        assert parts.count(None) == max(0, most - len(rows)), "fillers only beside single rows"
