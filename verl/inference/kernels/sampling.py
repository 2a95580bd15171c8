"""Sampling without truncation in one pass over the logits: the noisy argmax and its log-probs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.utils.token_sampling import SampledRows

__all__ = ["sample_rows"]

_TILE = 2048


def sample_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
) -> SampledRows:
    """`logits` [rows, vocab] → tokens and log-probs of each row.

    `slots` [rows] int64 says where in `keys` (int64), `temperature`, `greedy` (one entry per slot) a row's parameters
    are; keys and `positions` [rows] int64 give the noise of `verl.utils.counter_noise`, which greedy rows go without.
    """
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, _TILE)
    # Per tile: best noisy score, its token, its logit, the highest logit, sums of exponentials at temperature and at 1.
    partial = torch.empty(6, rows, tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _best_of_tile[(rows, tiles)](
        logits, slots, positions, keys, temperature, greedy, partial, vocab, logits.stride(0), rows * tiles, tiles,
        TILE=_TILE, num_warps=4,
    )  # fmt: skip
    _best_of_row[(rows,)](
        partial, slots, temperature, greedy, tokens, log_probs, rows, rows * tiles, tiles,
        TILES=triton.next_power_of_2(tiles), num_warps=1,
    )  # fmt: skip
    return SampledRows(tokens, log_probs[0], log_probs[1], log_probs[2])


@triton.jit
def _mix_64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix_32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _log(x):
    """The hardware's logarithm: this kernel is bound by arithmetic, and the noise needs no more than 1e-6."""
    log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 0.6931471805599453 * log2


@triton.jit
def _gumbel(key, position, token):
    """The noise of `counter_noise.gumbel_noise`: the same bits, made Gumbel-distributed to within rounding (2e-6)."""
    stream = _mix_64(key.to(tl.uint64) ^ _mix_64(position.to(tl.uint64) * 0x9E3779B97F4A7C15))
    low = stream.to(tl.uint32)
    high = (stream >> 32).to(tl.uint32)
    bits = _mix_32((token.to(tl.uint32) * 0x9E3779B1) ^ low)
    bits = _mix_32(bits + high)
    u = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    u = tl.minimum(u, 1.0 - 5.960464477539063e-08)
    # -log(1 - u): near 0, where the large noise comes from, by its series.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return -_log(tl.where(u < 0.03125, series, -_log(1.0 - u)))


@triton.jit
def _best_of_tile(
    logits_ptr, slots_ptr, positions_ptr, keys_ptr, temperature_ptr, greedy_ptr, partial_ptr,
    vocab, stride, plane, tiles,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < vocab
    logits = tl.load(logits_ptr + row * stride + token, inside, float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + slot)
    scores = logits / temperature
    noisy = scores
    if tl.load(greedy_ptr + slot) == 0:
        noisy = scores + _gumbel(tl.load(keys_ptr + slot), tl.load(positions_ptr + row), token)
        noisy = tl.where(inside, noisy, float("-inf"))
    best, where = tl.max(noisy, 0, return_indices=True)
    chosen = tl.sum(tl.where(tl.arange(0, TILE) == where, logits, 0.0), 0)
    highest = tl.max(logits, 0)
    raw_total = tl.sum(tl.exp(logits - highest), 0)
    total = raw_total
    if temperature != 1.0:
        total = tl.sum(tl.exp(scores - highest / temperature), 0)
    at = partial_ptr + row * tiles + tile
    tl.store(at, best)
    tl.store(at + plane, (tile * TILE + where).to(tl.float32))
    tl.store(at + 2 * plane, chosen)
    tl.store(at + 3 * plane, highest)
    tl.store(at + 4 * plane, total)
    tl.store(at + 5 * plane, raw_total)


@triton.jit
def _best_of_row(
    partial_ptr, slots_ptr, temperature_ptr, greedy_ptr, tokens_ptr, log_probs_ptr, rows, plane, tiles,
    TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    at = partial_ptr + row * tiles + tile
    _, where = tl.max(tl.load(at, inside, float("-inf")), 0, return_indices=True)
    mine = tile == where
    token = tl.sum(tl.where(mine, tl.load(at + plane, inside, 0.0), 0.0), 0)
    chosen = tl.sum(tl.where(mine, tl.load(at + 2 * plane, inside, 0.0), 0.0), 0)
    highest = tl.load(at + 3 * plane, inside, float("-inf"))
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    peak = tl.max(highest, 0)
    total = tl.sum(tl.where(inside, tl.load(at + 4 * plane, inside, 0.0) * tl.exp((highest - peak) / temperature), 0.0))
    raw_total = tl.sum(tl.where(inside, tl.load(at + 5 * plane, inside, 0.0) * tl.exp(highest - peak), 0.0))
    tl.store(tokens_ptr + row, token.to(tl.int64))
    log_prob = (chosen - peak) / temperature - tl.log(total)
    tl.store(log_probs_ptr + row, log_prob)
    tl.store(log_probs_ptr + rows + row, chosen - peak - tl.log(raw_total))
    tl.store(log_probs_ptr + 2 * rows + row, tl.where(tl.load(greedy_ptr + slot) == 0, log_prob, 0.0))
