"""Noise by counter: Gumbel-distributed, independent between keys, positions and tokens, and of nothing else."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.counter_noise import gumbel_noise, sample_key

ints = st.integers(min_value=0, max_value=2**40)


def keys_of(count: int) -> torch.Tensor:
    return torch.tensor([sample_key(7, 3, f"prompt-{i // 4}", i % 4) for i in range(count)])


@given(ints, ints, st.text(), ints)
def test_a_key_is_a_64_bit_integer_that_depends_on_every_part(seed, step, uid, index):
    key = sample_key(seed, step, uid, index)
    assert -(2**63) <= key < 2**63
    assert key == sample_key(seed, step, uid, index)
    others = [(seed + 1, step, uid, index), (seed, step + 1, uid, index), (seed, step, uid + "x", index)]
    assert key not in [sample_key(*parts) for parts in [*others, (seed, step, uid, index + 1)]]


def test_keys_and_noise_stay_what_they_are_between_versions():
    """A run that is resumed after an upgrade samples the same answers."""
    key = sample_key(1, 2, "uid", 3)
    assert key == -1909943600529566093
    noise = gumbel_noise(torch.tensor([key]), torch.tensor([5]), 4)
    torch.testing.assert_close(noise, torch.tensor([[-0.2817, -1.1035, 0.3039, 1.6796]]), atol=1e-4, rtol=0)


def test_parts_of_a_key_cannot_slide_into_each_other():
    assert sample_key(1, 2, "3/u", 4) != sample_key(1, 2, "u", 43)
    assert sample_key(1, 23, "u", 4) != sample_key(12, 3, "u", 4)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20)), min_size=1, max_size=8), st.data())
def test_a_rows_noise_does_not_depend_on_the_other_rows_or_the_vocabulary_beyond_it(rows, data):
    keys, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    whole = gumbel_noise(keys, positions, 50)
    order = data.draw(st.permutations(range(len(rows))))
    assert torch.equal(gumbel_noise(keys[order], positions[order], 50), whole[order])
    assert torch.equal(gumbel_noise(keys[:1], positions[:1], 20), whole[:1, :20])


def test_noise_has_the_gumbel_distribution():
    noise = gumbel_noise(keys_of(200), torch.arange(200), 1000).flatten().double()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 4 * 1.2825 / math.sqrt(noise.numel())
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03
    # Kolmogorov-Smirnov against exp(-exp(-x)); 1.95 / sqrt(n) is the 0.1 % level.
    ordered = noise.sort().values
    expected = torch.exp(-torch.exp(-ordered))
    ranks = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    assert (ranks - expected).abs().max() < 1.95 / math.sqrt(len(ordered))


def test_large_noise_is_fine_grained_so_that_rare_tokens_are_drawn_at_their_rate():
    noise = gumbel_noise(keys_of(400), torch.zeros(400, dtype=torch.int64), 50_000).flatten()
    top = noise.topk(2000).values
    # 2^31 × 1e-4 values lie up there: chance makes about 10 of 2000 equal. In 24 bits it would be hundreds.
    assert len(top.unique()) > 1960, "the tail that decides the argmax must not be coarse"
    share = (noise > 9.0).float().mean().item()
    assert abs(share / -math.expm1(-math.exp(-9.0)) - 1) < 0.1


def test_neighbouring_tokens_positions_and_keys_are_uncorrelated():
    keys = keys_of(300)
    positions = torch.arange(300)
    noise = gumbel_noise(keys, positions, 500)
    neighbours = [
        (noise[:, :-1], noise[:, 1:]),
        (noise, gumbel_noise(keys, positions + 1, 500)),
        (noise, gumbel_noise(keys + 1, positions, 500)),
        (noise, gumbel_noise(keys, positions + 2**32, 500)),
    ]
    for a, b in neighbours:
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
        assert abs(correlation) < 4.5 / math.sqrt(a.numel())
