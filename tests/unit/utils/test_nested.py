"""Nested values: equality all the way down, and where two differ."""

import numpy as np
import pytest
import torch

from verl.utils.nested import describe_difference, object_array, same

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
