"""columns: equality all the way down, checked rows and keys."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.columns import describe_difference, known_keys, mini_batch_rows, object_array, row_index, same

NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (NAN, NAN, True),
        (1, 1.0, True),
        (1, "1", False),
        ([1, [NAN]], [1, [NAN]], True),
        ([1], (1,), False),
        ([1], [1, 2], False),
        ({"a": NAN}, {"a": NAN}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, 0, False),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN]), False),
        (torch.tensor([1.0]), torch.tensor([1]), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor([NAN], dtype=torch.bfloat16), torch.tensor([NAN], dtype=torch.bfloat16), True),
        (torch.tensor([-0.0]), torch.tensor([0.0]), True),
        (torch.arange(21, dtype=torch.uint8), torch.arange(21, dtype=torch.uint8), True),
        (torch.arange(21, dtype=torch.uint8), torch.tensor([*range(20), 99], dtype=torch.uint8), False),
        (torch.arange(21, dtype=torch.uint8), torch.tensor([9, *range(1, 21)], dtype=torch.uint8), False),
        (torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]]), True),
        (torch.zeros(0, 3), torch.zeros(0, 3), True),
        (np.array([1.0, NAN]), np.array([1.0, NAN]), True),
        (np.array([1]), np.array([1.0]), False),
        (np.array(["a"]), np.array(["a"]), True),
        (np.array(["NaT"], dtype="datetime64[s]"), np.array(["NaT"], dtype="datetime64[s]"), True),
        (object_array([[1], np.array([NAN])]), object_array([[1], np.array([NAN])]), True),
        (object_array([[1], np.array([1])]), object_array([[1], np.array([2])]), False),
        (object_array([torch.zeros(2)]), object_array([torch.zeros(3)]), False),
    ],
)
def test_same_compares_all_the_way_down(a, b, equal):
    assert same(a, b) is equal
    assert same(b, a) is equal
    assert same(a, a) is True


def test_differences_are_described_by_type_or_by_row():
    assert describe_difference(torch.zeros(2), torch.zeros(3)) == "torch.float32 (2,) and torch.float32 (3,)"
    assert describe_difference(np.zeros(2), np.zeros(2, dtype=int)) == "float64 (2,) and int64 (2,)"
    assert describe_difference(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 2.0])) == "first in row 1"


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
        ([3], r"row 3 of 3"),
        ([-4], r"row -4 of 3"),
        ([True, False], r"a mask of shape \(2,\) for 3 rows"),
        (np.zeros((3, 1), dtype=bool), r"a mask of shape \(3, 1\) for 3 rows"),
        (np.zeros((0, 2), dtype=int), r"not int64 \(0, 2\)"),
        (1, r"not int64 \(\)"),
        (None, r"not object \(\)"),
    ):
        with pytest.raises(IndexError, match=message):
            row_index(rows, 3)


def test_known_keys_are_listed_once_in_the_order_given():
    assert known_keys(["b", "a", "b"], ["a", "b"], "x") == ["b", "a"]
    assert known_keys("ab", ["ab"], "x") == ["ab"]
    assert known_keys(None, ["a"], "x") == []
    with pytest.raises(KeyError, match=r"x: there is no \['c'\]; there is \['a', 'b'\]"):
        known_keys(["a", "c"], ["b", "a"], "x")


@given(st.integers(0, 30), st.integers(1, 8), st.integers(0, 5))
def test_dropping_the_last_leaves_only_full_mini_batches_of_different_rows(length, size, seed):
    batches = list(mini_batch_rows(length, size, epochs=1, seed=seed, shuffle=True, drop_last=True))
    assert [len(rows) for rows in batches] == [size] * (length // size)
    rows = [row for batch in batches for row in batch.tolist()]
    assert len(set(rows)) == len(rows)


def test_shuffles_differ_by_epoch_and_by_seed():
    def order(seed: int | None) -> list[list[int]]:
        return [rows.tolist() for rows in mini_batch_rows(50, 50, 2, seed, shuffle=True, drop_last=False)]

    assert order(1)[0] != order(1)[1]
    assert order(1) != order(2)
    assert order(None) != order(None)
