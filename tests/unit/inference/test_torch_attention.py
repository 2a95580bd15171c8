"""Paged attention in torch equals attention written out by hand, whatever lies in the pages that no one may see."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.inference import attention
from verl.inference.attention import AttentionStep, TorchAttention

DIM = 8


@settings(max_examples=60)
@given(
    prefills=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), max_size=4),
    decodes=st.lists(st.integers(1, 40), max_size=7),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 5, 17]),
    softcap=st.sampled_from([None, 0.7]),
    padding=st.sampled_from([0, 6, 150]),
    seed=st.integers(0, 2**16),
)
def test_any_mix_of_chunks_and_decodes(prefills, decodes, heads, block_size, window, softcap, padding, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TOKENS_PER_CALL", padding)
        patch.setattr(attention, "SCORE_ELEMENTS", 64)
        difference = compared(prefills, decodes, heads, block_size, window, softcap, seed)
    assert difference < 1e-5


def compared(prefills, decodes, heads, block_size, window, softcap, seed) -> float:
    """Largest difference from attention by hand; `prefills` are (tokens before, tokens of the chunk)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [before + chunk for before, chunk in prefills] + decodes
    counts = [chunk for _, chunk in prefills] + [1] * len(decodes)
    if not lengths:
        return 0.0
    query_heads, kv_heads = heads
    texts = [[torch.randn(n, h, DIM, generator=generator) for h in (query_heads, kv_heads, kv_heads)] for n in lengths]
    tables, cache = paged(texts, counts, block_size, seed)
    new = [[part[-count:] for part in text] for text, count in zip(texts, counts, strict=True)]
    query, key, value = (torch.cat(parts) for parts in zip(*new, strict=True))
    slots = [
        tables[i, p // block_size] * block_size + p % block_size
        for i, (n, count) in enumerate(zip(lengths, counts, strict=True))
        for p in range(n - count, n)
    ]
    first = len(prefills)
    starts = torch.tensor([0, *counts[:first]], dtype=torch.int32).cumsum(0).int()
    step = AttentionStep(
        kv_cache=[cache],
        backend=TorchAttention(),
        slots=torch.tensor(slots, dtype=torch.int64),
        num_prefill_tokens=int(starts[-1]),
        query_starts=starts,
        prefill_lengths=torch.tensor(lengths[:first], dtype=torch.int32),
        prefill_tables=tables[:first],
        decode_lengths=torch.tensor(decodes, dtype=torch.int32),
        decode_tables=tables[first:],
    )
    found = step.backend(0, query, key, value, step, 0.3, window, softcap)
    expected = torch.cat([by_hand(*text, window, softcap)[-n:] for text, n in zip(texts, counts, strict=True)])
    return float((found - expected).abs().max())


def paged(texts, counts, block_size, seed) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Block tables, and a cache that holds all but the last `counts` tokens of each text; NaN everywhere else."""
    widths = [-(-len(text[0]) // block_size) for text in texts]
    order = random.Random(seed).sample(range(sum(widths) + 1), sum(widths) + 1)
    tables = torch.zeros(len(texts), max(widths), dtype=torch.int32)
    shape = (sum(widths) + 1, block_size, *texts[0][1].shape[1:])
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for row, (text, count, width) in enumerate(zip(texts, counts, widths, strict=True)):
        tables[row, :width] = torch.tensor([order.pop() for _ in range(width)], dtype=torch.int32)
        for position in range(len(text[0]) - count):
            block, place = tables[row, position // block_size], position % block_size
            keys[block, place], values[block, place] = text[1][position], text[2][position]
    return tables, (keys, values)


def by_hand(query, key, value, window, softcap) -> torch.Tensor:
    """[n, heads, dim] in float64, one token after the other."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (
        query.double(),
        key.repeat_interleave(group, 1).double(),
        value.repeat_interleave(group, 1).double(),
    )
    out = []
    for position in range(len(query)):
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        scores = torch.einsum("hd,shd->hs", query[position], key[seen]) * 0.3
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        out.append(torch.einsum("hs,shd->hd", scores.softmax(-1), value[seen]))
    return torch.stack(out)


def test_bfloat16_follows_float32_within_its_precision():
    generator = torch.Generator().manual_seed(0)
    text = [torch.randn(30, h, DIM, generator=generator) for h in (4, 2, 2)]
    tables, (keys, values) = paged([text], [1], 4, 0)
    step = AttentionStep(
        kv_cache=[(keys.bfloat16(), values.bfloat16())],
        backend=TorchAttention(),
        slots=tables[0, 7:8].long() * 4 + 1,
        num_prefill_tokens=0,
        query_starts=torch.zeros(1, dtype=torch.int32),
        prefill_lengths=torch.zeros(0, dtype=torch.int32),
        prefill_tables=torch.zeros(0, dtype=torch.int32),
        decode_lengths=torch.tensor([30], dtype=torch.int32),
        decode_tables=tables,
    )
    found = step.backend(0, *(part[-1:].bfloat16() for part in text), step, 0.3)
    assert found.dtype == torch.bfloat16
    assert (found.float() - by_hand(*text, None, None)[-1:]).abs().max() < 0.02
