"""Fingerprints see every bit and its place, and add up over parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.weight_fingerprint import BLOCK, Placement, fingerprints, tensor_fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]
FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def made(shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def number(tensor: torch.Tensor, **more) -> int:
    return int(tensor_fingerprint(tensor, **more))


def wrapped(total: int) -> int:
    """As int64 would have it."""
    return (total + 2**63) % 2**64 - 2**63


def reference(bits: np.ndarray, indices) -> int:
    """The definition, in Python's own whole numbers."""

    def mixed(z: int) -> int:
        z = z * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31 | 1

    weights = (mixed(2**63 + 1 + i // BLOCK) * mixed(1 + i % BLOCK) for i in indices)
    return wrapped(sum(int(x) * w for x, w in zip(bits.tolist(), weights, strict=True)))


@pytest.mark.parametrize("start", [0, 1, BLOCK - 1, 5 * BLOCK + 17])
@pytest.mark.parametrize("size", [0, 1, 3, BLOCK, 2 * BLOCK + 5])
def test_it_is_the_sum_of_bits_times_the_mix_of_their_index(start, size):
    tensor = made((size,), dtype=torch.bfloat16)
    expected = reference(tensor.view(torch.int16).numpy(), range(start, start + size))
    assert number(tensor, placement=Placement(start)) == expected


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 300), st.integers(1, 9), st.integers(0, 1), FLOATS)
def test_parts_by_rows_or_columns_add_up_to_the_whole(seed, rows, columns, count, dim, dtype):
    whole = made((rows, columns), seed, dtype)
    total, start = 0, 0
    for part in whole.chunk(count, dim):
        place = Placement.of_shard(part.shape, dim, start, whole.shape[dim])
        total += number(part, placement=place)
        start += part.shape[dim]
    assert wrapped(total) == number(whole)


@given(st.integers(0, 1000), st.integers(0, 3 * BLOCK), st.lists(st.integers(0, 3 * BLOCK), max_size=4), FLOATS)
def test_flat_parts_of_any_size_add_up_to_the_whole(seed, size, cuts, dtype):
    whole = made((size,), seed, dtype)
    ends = [0, *sorted(min(cut, size) for cut in cuts), size]
    parts = [number(whole[a:b], placement=Placement(a)) for a, b in itertools.pairwise(ends)]
    assert wrapped(sum(parts)) == number(whole)


def test_a_part_of_the_middle_of_three_dimensions_is_counted_in_its_place():
    whole = made((3, 40, 50))
    parts = [
        number(whole[:, a : a + 10], placement=Placement.of_shard((3, 10, 50), 1, a, 40)) for a in range(0, 40, 10)
    ]
    assert wrapped(sum(parts)) == number(whole)
    first = [number(whole[a : a + 1], placement=Placement.of_shard((1, 40, 50), 0, a, 3)) for a in range(3)]
    assert wrapped(sum(first)) == number(whole)


@given(st.integers(0, 1000), st.integers(2, 40), st.integers(2, 40), FLOATS, st.data())
def test_a_tensor_in_another_order_is_another_tensor(seed, rows, columns, dtype, data):
    tensor = made((rows, columns), seed, dtype)
    flat = tensor.flatten()
    swapped = flat.clone()
    one = data.draw(st.integers(0, len(flat) - 2))
    other = data.draw(st.integers(one + 1, len(flat) - 1))
    swapped[[one, other]] = flat[[other, one]]
    shift = data.draw(st.integers(1, rows * columns - 1))
    row = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    others = {
        "transposed": tensor.T.contiguous(),
        "rolled": flat.roll(shift),
        "rows rolled": tensor.roll(1, 0),
        "columns rolled": tensor.roll(1, 1),
        "rows permuted": tensor[row],
        "columns turned": tensor.flip(1),
        "two swapped": swapped,
    }
    expected = number(tensor)
    for name, changed in others.items():
        same = torch.equal(changed.reshape(-1), flat)
        assert (number(changed) == expected) == same, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_among_zeros_is_seen_wherever_it_goes(dtype):
    """A plain sum of bits is the same for all of them."""
    places = [0, 1, 63, BLOCK - 1, BLOCK, 2 * BLOCK, 9 * BLOCK + 1]
    found = []
    for place in places:
        tensor = torch.zeros(10 * BLOCK, dtype=dtype)
        tensor[place] = -0.0
        found.append(number(tensor))
    assert len({*found, 0}) == len(places) + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_bit_shows(dtype):
    tensor = torch.ones(4, 3).to(dtype)
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[2] ^= 1
    assert number(tensor) != number(changed)


def test_minus_zero_is_not_zero():
    assert number(torch.tensor([-0.0])) != number(torch.tensor([0.0]))


def test_fingerprints_are_taken_in_the_dtype_asked_for():
    weights = torch.randn(20)
    assert fingerprints({"a": weights}, torch.bfloat16) == fingerprints({"a": weights.bfloat16()})
    assert fingerprints({"a": weights}, torch.bfloat16) != fingerprints({"a": weights})
    steps = torch.arange(5)
    assert fingerprints({"steps": steps}, torch.bfloat16) == {"steps": number(steps)}
    assert fingerprints({"a": weights}, placements={"a": Placement(7)}) == {
        "a": number(weights, placement=Placement(7))
    }
    assert fingerprints({}) == {}


def test_views_count_what_they_show():
    matrix = torch.randn(6, 4)
    assert number(matrix.T) == number(matrix.T.contiguous())
    assert number(matrix[:, :2]) == number(matrix[:, :2].clone())
