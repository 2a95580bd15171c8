"""Micro-batches: every row once, within the limits; fillers and metric sums."""

import pytest
import torch
from engine_cases import make_batch
from hypothesis import given
from hypothesis import strategies as st

from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.micro_batches import MetricSums, filler_batch, local_counts, micro_batch_rows

LENGTHS = st.lists(st.integers(1, 30), max_size=20)


@given(lengths=LENGTHS, size=st.integers(1, 7))
def test_a_size_cuts_consecutive_rows(lengths, size):
    parts = micro_batch_rows(lengths, MicroBatching(size=size))
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    assert all(len(part) == size for part in parts[:-1])


@given(lengths=LENGTHS, budget=st.integers(1, 80))
def test_a_token_budget_is_kept_by_every_part_of_several_rows(lengths, budget):
    parts = micro_batch_rows(lengths, MicroBatching(max_tokens=budget))
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[row] for row in part) <= budget for part in parts)


def test_without_a_limit_all_rows_go_at_once():
    assert micro_batch_rows([3, 4], MicroBatching()) == [[0, 1]]
    assert micro_batch_rows([], MicroBatching()) == []


def test_a_limit_of_no_rows_is_refused():
    with pytest.raises(ValueError, match="size: 0"):
        micro_batch_rows([1], MicroBatching(size=0))


def test_a_filler_is_one_row_that_a_model_can_read():
    filler = filler_batch(make_batch(rows=3)[:0])
    assert len(filler) == 1
    assert filler.batch["attention_mask"].all()
    assert filler.batch["responses"].shape == (1, 9)


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
