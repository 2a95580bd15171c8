"""Paged attention on CUDA: decode (one query per sequence, keys split over programs) and varlen (any mix).

Every launch depends only on shapes, so that CUDA graphs can capture it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.inference.attention import AttentionStep
from verl.inference.kernels.pointwise import write_cache

__all__ = ["TritonAttention", "decode_attention", "varlen_attention"]

_LOG2_E = 1.4426950408889634
# Target number of programs per decode launch: enough to fill a large GPU several times. With few sequences, the keys
# of each are split over several programs to reach it.
WANTED_PROGRAMS = 512
_MAX_SPLITS = 16
# Rows of one varlen tile: a few query tokens times the heads that share their keys.
_TILE_ROWS = 64


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`query` [rows, heads, dim] against `keys`, `values` [blocks, block, kv, dim] → [rows, heads, dim].

    Rows of `query` may have any stride. `tables` [rows, columns] int32: blocks of each row; `lengths` [rows] int32:
    number of its tokens in the cache. The number of programs per row depends only on shapes, so that CUDA graphs can
    capture it.
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    longest = tables.shape[1] * keys.shape[1]
    splits = max(1, min(_MAX_SPLITS, WANTED_PROGRAMS // (rows * kv_heads), triton.cdiv(longest, 128)))
    # A power of two: for every other number a further kernel would be compiled during a run.
    splits = 1 << (splits.bit_length() - 1)
    out = query.new_empty(rows, heads, dim)
    partial = query.new_empty((rows, heads, splits, dim) if splits > 1 else (1,), dtype=torch.float32)
    # Of each split: the highest score, and the sum of exponentials relative to it.
    statistics = query.new_empty((rows, heads, splits, 2) if splits > 1 else (1,), dtype=torch.float32)
    _decode[(rows, kv_heads, splits)](
        query, keys, values, tables, lengths, out, partial, statistics,
        scale * _LOG2_E, query.stride(0), tables.stride(0), window or 0, softcap or 0.0,
        HEADS=heads, KV=kv_heads, GROUP=group, GROUP_BLOCK=max(16, triton.next_power_of_2(group)), DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim), PAGE=keys.shape[1], SPLITS=splits,
        HAS_WINDOW=window is not None, HAS_CAP=softcap is not None, **decode_launch(dim, splits),
    )  # fmt: skip
    if splits > 1:
        _join_splits[(rows * heads,)](
            partial, statistics, out, SPLITS=splits, DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), num_warps=2
        )
    return out


def decode_launch(dim: int, splits: int) -> dict[str, int]:
    """Keys per tile, warps and pipeline stages: the fastest on an H200 (benchmarks/attention.py)."""
    if dim > 64 and splits == 1:
        return {"TILE": 32, "num_warps": 2, "num_stages": 2}
    return {"TILE": 64, "num_warps": 2, "num_stages": 3}


def varlen_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of several sequences: `query` [tokens, heads, dim] → the same shape.

    Sequence i has the query tokens query_starts[i] to query_starts[i + 1] (int32, [sequences + 1]), which are the last
    of its `lengths[i]` tokens in the cache. Sequences may be empty; the grid depends only on shapes.
    """
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    group_block = triton.next_power_of_2(group)
    rows = max(_TILE_ROWS, group_block)
    sequences = lengths.shape[0]
    out = query.new_empty(tokens, heads, dim)
    _varlen[(tokens // (rows // group_block) + sequences, kv_heads)](
        query, keys, values, query_starts, tables, lengths, out,
        scale * _LOG2_E, query.stride(0), tables.stride(0), window or 0, softcap or 0.0, sequences,
        HEADS=heads, KV=kv_heads, GROUP=group, GROUP_BLOCK=group_block, DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim),
        PAGE=keys.shape[1], ROWS=rows, TILE=64, HAS_WINDOW=window is not None, HAS_CAP=softcap is not None,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _scores(query, key, scale, softcap, HAS_CAP: tl.constexpr):
    """Scaled products in units of log2."""
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if HAS_CAP:
        capped = softcap * 1.4426950408889634
        # tanh by exponentials: sufficiently exact, without a library call.
        scores = capped * (2.0 / (1.0 + tl.exp2(-2.8853900817779268 * scores / capped)) - 1.0)
    return scores


@triton.jit
def _decode(
    query_ptr, keys_ptr, values_ptr, tables_ptr, lengths_ptr, out_ptr, partial_ptr, statistics_ptr,
    scale, query_stride, table_stride, window, softcap,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, length - window) // TILE
    tiles = tl.cdiv(length, TILE) - first
    per_split = tl.cdiv(tiles, SPLITS)
    begin = (first + split * per_split) * TILE
    end = tl.minimum(length, begin + per_split * TILE)

    member = tl.arange(0, GROUP_BLOCK)
    column = tl.arange(0, DIM_BLOCK)
    in_head = column < DIM
    offset = (kv * GROUP + member)[:, None] * DIM + column[None, :]
    member_inside = (member < GROUP)[:, None] & in_head[None, :]
    query = tl.load(query_ptr + row * query_stride + offset, member_inside, 0.0)
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    gathered = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < end
        if HAS_WINDOW:
            inside &= position >= length - window
        block = tl.load(tables_ptr + row * table_stride + position // PAGE, inside, 0).to(tl.int64)
        entry = (block * PAGE + position % PAGE) * KV * DIM + kv * DIM
        key = tl.load(keys_ptr + entry[None, :] + column[:, None], inside[None, :] & in_head[:, None], 0.0)
        value = tl.load(values_ptr + entry[:, None] + column[None, :], inside[:, None] & in_head[None, :], 0.0)
        scores = _scores(query, key, scale, softcap, HAS_CAP)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        # As long as no key is visible, the reference is 0 and all sums stay 0.
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(best - reference)
        total = total * shrink + tl.sum(weight, 1)
        gathered = gathered * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        best = highest
    if SPLITS == 1:
        out = gathered / total[:, None]
        tl.store(out_ptr + row * HEADS * DIM + offset, out.to(out_ptr.dtype.element_ty), member_inside)
    else:
        head = row * HEADS + kv * GROUP + member
        at = (head * SPLITS + split)[:, None] * DIM + column[None, :]
        tl.store(partial_ptr + at, gathered, member_inside)
        tl.store(statistics_ptr + (head * SPLITS + split) * 2, best, member < GROUP)
        tl.store(statistics_ptr + (head * SPLITS + split) * 2 + 1, total, member < GROUP)


@triton.jit
def _join_splits(
    partial_ptr, statistics_ptr, out_ptr, SPLITS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM_BLOCK)
    in_head = column < DIM
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    joined = tl.zeros([DIM_BLOCK], tl.float32)
    for split in range(SPLITS):
        at = head * SPLITS + split
        split_total = tl.load(statistics_ptr + at * 2 + 1)
        split_best = tl.where(split_total > 0, tl.load(statistics_ptr + at * 2), float("-inf"))
        highest = tl.maximum(best, split_best)
        shrink, grow = tl.exp2(best - highest), tl.exp2(split_best - highest)
        shrink = tl.where(best == float("-inf"), 0.0, shrink)
        grow = tl.where(split_best == float("-inf"), 0.0, grow)
        joined = joined * shrink + tl.load(partial_ptr + at * DIM + column, in_head, 0.0) * grow
        total = total * shrink + split_total * grow
        best = highest
    tl.store(out_ptr + head * DIM + column, (joined / total).to(out_ptr.dtype.element_ty), in_head)


@triton.jit
def _sequence_of(query_starts_ptr, tile, sequences, TOKENS: tl.constexpr):
    """The sequence that `tile` belongs to: the first tile of sequence i is query_starts[i] // TOKENS + i."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _varlen(
    query_ptr, keys_ptr, values_ptr, query_starts_ptr, tables_ptr, lengths_ptr, out_ptr,
    scale, query_stride, table_stride, window, softcap, sequences,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    # The last tiles (decodes, ends of prompts) have the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv = tl.program_id(1)
    tokens_per_tile: tl.constexpr = ROWS // GROUP_BLOCK
    sequence = _sequence_of(query_starts_ptr, tile, sequences, tokens_per_tile)
    start = tl.load(query_starts_ptr + sequence)
    queries = tl.load(query_starts_ptr + sequence + 1) - start
    first_token = (tile - (start // tokens_per_tile + sequence)) * tokens_per_tile
    if first_token >= queries:
        return
    length = tl.load(lengths_ptr + sequence)
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP_BLOCK
    member = row % GROUP_BLOCK
    row_inside = (token < queries) & (member < GROUP)
    query_position = length - queries + token
    column = tl.arange(0, DIM_BLOCK)
    in_head = column < DIM
    head_at = (kv * GROUP + member) * DIM
    at = (start + token).to(tl.int64)
    query = tl.load(
        query_ptr + (at * query_stride + head_at)[:, None] + column[None, :],
        row_inside[:, None] & in_head[None, :],
        0.0,
    )
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    end = tl.minimum(length, length - queries + first_token + tokens_per_tile)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, length - queries + first_token - window + 1) // TILE * TILE
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    for position_start in range(begin, end, TILE):
        position = position_start + tl.arange(0, TILE)
        inside = position < end
        block = tl.load(table + position // PAGE, inside, 0).to(tl.int64)
        entry = (block * PAGE + position % PAGE) * KV * DIM + kv * DIM
        key = tl.load(keys_ptr + entry[None, :] + column[:, None], inside[None, :] & in_head[:, None], 0.0)
        value = tl.load(values_ptr + entry[:, None] + column[None, :], inside[:, None] & in_head[None, :], 0.0)
        scores = _scores(query, key, scale, softcap, HAS_CAP)
        visible = inside[None, :] & (position[None, :] <= query_position[:, None])
        if HAS_WINDOW:
            visible &= position[None, :] > query_position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(best - reference)
        total = total * shrink + tl.sum(weight, 1)
        gathered = gathered * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        best = highest
    out = (gathered / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + (at * HEADS * DIM + head_at)[:, None] + column[None, :], out, row_inside[:, None] & in_head[None, :]
    )


class TritonAttention:
    """An AttentionBackend; models that write the cache themselves call `attend`."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: AttentionStep,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        write_cache(key, value, step.slots, *step.kv_cache[layer])
        return self.attend(layer, query, step, scale, window, softcap)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        step: AttentionStep,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """`query` [T, heads, head_dim] → the same shape; heads and dims are contiguous, rows may have any stride."""
        keys, values = step.kv_cache[layer]
        prefilled = step.num_prefill_tokens
        parts = []
        if prefilled:
            parts.append(
                varlen_attention(
                    query[:prefilled], keys, values, step.query_starts, step.prefill_tables, step.prefill_lengths,
                    scale, window, softcap,
                )
            )  # fmt: skip
        if len(step.decode_lengths):
            parts.append(
                decode_attention(
                    query[prefilled:], keys, values, step.decode_tables, step.decode_lengths, scale, window, softcap
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
