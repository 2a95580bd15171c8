"""The names that users' own loops import: cut by tokens, put back in order, equally many parts on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine_cases import make_batch
from verl.utils.seqlen_balancing import prepare_dynamic_batch, rearrange_micro_batches, restore_dynamic_batch


@settings(max_examples=30)
@given(rows=st.integers(1, 12), budget=st.integers(16, 60), seed=st.integers(0, 3))
def test_results_of_the_parts_go_back_to_their_rows(rows, budget, seed):
    data = make_batch(rows=rows, seed=seed)
    parts, index_lists = prepare_dynamic_batch(data, max_token_len=budget)
    assert all(int(part.batch["attention_mask"].sum()) <= budget for part in parts)
    together = torch.cat([part.batch["input_ids"] for part in parts])
    assert torch.equal(restore_dynamic_batch(together, index_lists), data.batch["input_ids"])
    tensors, same_lists = rearrange_micro_batches(data.batch, budget)
    assert same_lists == index_lists
    assert all(torch.equal(td["responses"], p.batch["responses"]) for td, p in zip(tensors, parts, strict=True))


def test_the_number_of_parts_can_be_asked_for():
    data = make_batch(rows=6)
    assert len(rearrange_micro_batches(data.batch, 10_000)[0]) == 1
    assert len(rearrange_micro_batches(data.batch, 10_000, min_num_micro_batch=3)[0]) == 3
    assert len(rearrange_micro_batches(data.batch, 10_000, min_num_micro_batch=3, num_batches_divided_by=2)[0]) == 4
    with pytest.raises(ValueError, match=r"^rearrange_micro_batches: 6 rows .*\b8 micro-batches.*max_token_len"):
        rearrange_micro_batches(data.batch, 10_000, min_num_micro_batch=8)


def test_results_that_are_not_all_there_are_refused():
    with pytest.raises(ValueError, match=r"^restore_dynamic_batch: 2\b.*\b3 rows"):
        restore_dynamic_batch(torch.zeros(2), [[0, 2], [1]])
