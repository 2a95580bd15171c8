"""Fingerprints see every bit and add up over shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.weight_fingerprint import fingerprints, tensor_fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([torch.float32, torch.bfloat16]))
def test_shards_add_up_to_the_whole(seed, shards, dtype):
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert sum(tensor_fingerprint(part) for part in whole.chunk(shards)) == tensor_fingerprint(whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_bit_shows(dtype):
    tensor = torch.ones(4, 3).to(dtype)
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[2] ^= 1
    assert tensor_fingerprint(tensor) != tensor_fingerprint(changed)


def test_minus_zero_is_not_zero():
    assert tensor_fingerprint(torch.tensor([-0.0])) != tensor_fingerprint(torch.tensor([0.0]))


def test_fingerprints_are_taken_in_the_dtype_asked_for():
    weights = torch.randn(20)
    assert fingerprints({"a": weights}, torch.bfloat16) == fingerprints({"a": weights.bfloat16()})
    assert fingerprints({"a": weights}, torch.bfloat16) != fingerprints({"a": weights})
    assert fingerprints({"steps": torch.arange(5)}, torch.bfloat16) == {"steps": 10}
    assert fingerprints({}) == {}


def test_views_count_what_they_show():
    matrix = torch.randn(6, 4)
    assert tensor_fingerprint(matrix.T) == tensor_fingerprint(matrix)
    assert tensor_fingerprint(matrix[:, :2]) == tensor_fingerprint(matrix[:, :2].clone())
