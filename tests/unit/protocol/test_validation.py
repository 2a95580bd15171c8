"""Validation of rows, keys and mini-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.protocol.columns import known_keys, mini_batch_rows, row_index


@given(st.integers(0, 20), st.data())
def test_row_index_means_what_a_list_index_means(length, data):
    rows = data.draw(st.lists(st.integers(-length, length - 1))) if length else []
    plain = list(range(length))
    for form in (rows, tuple(rows), np.array(rows, dtype=np.int16), torch.tensor(rows, dtype=torch.int32)):
        index = row_index(form, length)
        assert index.dtype == np.int64
        assert index.tolist() == [plain[i] for i in rows]


def test_row_index_refuses_rows_outside_and_masks_of_another_length():
    for rows, message in (
        ([3], r"row 3 .*\b3 rows"),
        ([-4], r"row -4 .*\b3 rows"),
        ([True, False], r"mask .*\(2,\) .*\b3 rows"),
        (np.zeros((3, 1), dtype=bool), r"mask .*\(3, 1\) .*\b3 rows"),
        (np.zeros((0, 2), dtype=int), r"int64 \(0, 2\)"),
        (1, r"int64 \(\)"),
        (None, r"object \(\)"),
    ):
        with pytest.raises(IndexError, match=message):
            row_index(rows, 3)


def test_known_keys_are_listed_once_in_the_order_given():
    assert known_keys(["b", "a", "b"], ["a", "b"], "x") == ["b", "a"]
    assert known_keys("ab", ["ab"], "x") == ["ab"]
    assert known_keys(None, ["a"], "x") == []
    with pytest.raises(KeyError, match=r"^.x: \['c'\].*\['a', 'b'\]"):
        known_keys(["a", "c"], ["b", "a"], "x")


@given(st.integers(0, 30), st.integers(1, 8), st.integers(0, 5))
def test_dropping_the_last_leaves_only_full_mini_batches_of_different_rows(length, size, seed):
    batches = list(mini_batch_rows(length, size, 1, seed, {"shuffle": True, "drop_last": True}))
    assert [len(rows) for rows in batches] == [size] * (length // size)
    rows = [row for batch in batches for row in batch.tolist()]
    assert len(set(rows)) == len(rows)


def test_shuffles_differ_by_epoch_and_by_seed():
    def order(seed: int | None) -> list[list[int]]:
        return [rows.tolist() for rows in mini_batch_rows(50, 50, 2, seed, {"shuffle": True})]

    assert order(1)[0] != order(1)[1]
    assert order(1) != order(2)
    assert order(None) != order(None)
