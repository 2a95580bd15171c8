"""Micro-batches: every row once, within the limits; fillers and metric sums."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine_cases import make_batch
from verl.utils.balancing import SequenceCost
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.micro_batches import (
    MetricSums,
    filler_batch,
    local_counts,
    micro_batch_rows,
    micro_batches,
)

LENGTHS = st.lists(st.integers(1, 30), max_size=20)


@given(lengths=LENGTHS, size=st.integers(1, 7))
def test_a_size_cuts_consecutive_rows(lengths, size):
    parts = micro_batch_rows(lengths, MicroBatching(size=size))
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    assert all(len(part) == size for part in parts[:-1])


@given(lengths=LENGTHS, budget=st.integers(1, 80), at_least=st.integers(1, 25), pair=st.sampled_from([0.0, 0.1, 10.0]))
def test_a_token_budget_is_kept_by_every_part_of_several_rows(lengths, budget, at_least, pair):
    cost = SequenceCost(1.0, 0.0, pair)
    parts = micro_batch_rows(lengths, MicroBatching(max_tokens=budget), cost, at_least)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[row] for row in part) <= budget for part in parts)
    assert parts == micro_batch_rows(list(lengths), MicroBatching(max_tokens=budget), cost, at_least)
    for part in parts:
        assert [lengths[row] for row in part] == sorted((lengths[row] for row in part), reverse=True)
    costs = [sum(cost([lengths[row] for row in part])) for part in parts]
    assert costs == sorted(costs, reverse=True), "what costs most meets what costs most on other ranks"


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), budget=st.integers(30, 80))
def test_a_token_budget_needs_few_parts(lengths, budget):
    """Best fit, longest first, is within 11/9 of the optimum and one; the tokens alone bound that from below."""
    parts = micro_batch_rows(lengths, MicroBatching(max_tokens=budget))
    long_rows = sum(length > budget / 2 for length in lengths)  # no two of them fit together
    fewest = max(-(-sum(lengths) // budget), long_rows)
    assert fewest <= len(parts) <= 2 * fewest


@given(lengths=LENGTHS, size=st.integers(1, 7), at_least=st.integers(1, 25))
def test_more_parts_than_a_size_needs_are_runs_of_rows_too(lengths, size, at_least):
    parts = micro_batch_rows(lengths, MicroBatching(size=size), at_least=at_least)
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    assert all(0 < len(part) <= size for part in parts)
    assert len(parts) == max(-(-len(lengths) // size), min(at_least, len(lengths)))


@pytest.mark.parametrize("micro", [MicroBatching(size=3), MicroBatching(max_tokens=40), MicroBatching()])
def test_a_rank_with_fewer_parts_cuts_its_rows_into_more_and_only_then_takes_fillers(micro):
    data = make_batch(rows=5)
    cost = SequenceCost(1.0, 0.0, 0.01)
    for wanted, fillers in ((4, 0), (5, 0), (8, 3)):
        found = [rows for _, rows in micro_batches(data, micro, cost, lambda mine, wanted=wanted: max(mine, wanted))]
        assert len(found) == wanted
        assert found.count(None) == fillers
        assert sorted(row for rows in found if rows for row in rows) == [0, 1, 2, 3, 4]


@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=20),
    limit=st.integers(1, 80),
    by_tokens=st.booleans(),
    at_least=st.integers(1, 9),
)
def test_rows_that_stay_together_are_one_row_to_every_limit(rows, limit, by_tokens, at_least):
    lengths, together = map(list, zip(*rows, strict=True))
    micro = MicroBatching(max_tokens=limit) if by_tokens else MicroBatching(size=limit)
    parts = micro_batch_rows(lengths, micro, at_least=at_least, together=together)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    sets = [{together[row] for row in part} for part in parts]
    assert sum(map(len, sets)) == len(set(together)), "none is in two parts"
    for part, numbers in zip(parts, sets, strict=True):
        size = sum(lengths[row] for row in part) if by_tokens else len(part)
        assert len(numbers) == 1 or size <= limit


def test_attention_counts_where_parts_are_evened_out():
    """Four long rows and many short ones: by tokens the long could sit together, by cost they may not."""
    lengths = [100] * 4 + [10] * 40
    found = micro_batch_rows(lengths, MicroBatching(max_tokens=400), SequenceCost(1.0, 0.0, 1.0))
    assert [sum(lengths[row] == 100 for row in part) for part in found] == [2, 2]


def test_without_a_limit_all_rows_go_at_once():
    assert micro_batch_rows([3, 4], MicroBatching()) == [[0, 1]]
    assert micro_batch_rows([], MicroBatching()) == []


def test_a_limit_of_no_rows_is_refused():
    with pytest.raises(ValueError, match=r"^micro batch size: 0 "):
        MicroBatching(size=0)


def test_a_filler_is_one_row_that_a_model_can_read_at_little_cost():
    filler = filler_batch(make_batch(rows=3, prompt=7)[:0])
    assert len(filler) == 1
    assert filler.batch["attention_mask"].nonzero()[:, 1].tolist() == [6, 7], "the end of a prompt and one answer token"
    assert filler.batch["responses"].shape == (1, 9)
    texts = filler_batch(make_batch(rows=3).select(["input_ids", "attention_mask"]))
    assert texts.batch["attention_mask"].sum() == 1


def test_counts_are_masked_tokens_and_rows_that_have_any():
    data = make_batch(rows=3)
    data.batch["response_mask"] = torch.tensor([[1] * 9, [0] * 9, [1] + [0] * 8])
    counts = local_counts(data)
    assert (counts.tokens, counts.sequences) == (10.0, 2.0)


def test_metric_sums_add_numbers_and_tensors_without_their_graph():
    sums = MetricSums()
    value = torch.tensor(2.0, requires_grad=True)
    sums.add("loss", value * 2, 3)
    sums.add("loss", 0.5, torch.tensor(1))
    assert sums.result() == {"loss": (4.5, 4.0)}
