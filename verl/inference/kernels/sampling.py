"""Sampling without truncation in one pass over the logits: the argmax with Gumbel noise, and its log-probs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.inference.step_plan import SampledRows

__all__ = ["sample_rows"]

# Logits per program, processed in steps of lanes × fold; each thread reduces its own without synchronisation.
_SPAN = 16384
_LANES = 256
_FOLD = 4


def sample_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
) -> SampledRows:
    """`logits` [rows, vocab] → tokens and log-probs of each row.

    `slots` [rows] int64: index of a row's parameters in `keys` (int64), `temperature` and `greedy`. Keys and
    `positions` [rows] int64 determine the noise (see `verl.utils.counter_noise`), which greedy rows do not use.
    """
    rows, vocab = logits.shape
    spans = triton.cdiv(vocab, _SPAN)
    # Per span: best noisy score, its token, the highest logit, sums of exponentials at temperature and at 1.
    partial = torch.empty(5, rows, spans, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _best_of_span[(rows, spans)](
        logits, slots, positions, keys, temperature, greedy, partial, vocab, logits.stride(0), rows * spans, spans,
        SPAN=_SPAN, LANES=_LANES, FOLD=_FOLD, num_warps=_LANES // 32,
    )  # fmt: skip
    _best_of_row[(rows,)](
        logits, partial, slots, temperature, greedy, tokens, log_probs, rows, logits.stride(0), rows * spans, spans,
        SPANS=triton.next_power_of_2(spans), num_warps=1,
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
    """The hardware's logarithm: this kernel is limited by arithmetic, and 1e-6 is exact enough for the noise."""
    log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 0.6931471805599453 * log2


@triton.jit
def _stream(key, position):
    """The two words from which the noise of all tokens at a position is computed."""
    stream = _mix_64(key.to(tl.uint64) ^ _mix_64(position.to(tl.uint64) * 0x9E3779B97F4A7C15))
    return stream.to(tl.uint32), (stream >> 32).to(tl.uint32)


@triton.jit
def _gumbel(low, high, token):
    """The noise of `counter_noise.gumbel_noise`: the same bits, with rounding differences up to 2e-6."""
    bits = _mix_32((token.to(tl.uint32) * 0x9E3779B1) ^ low)
    bits = _mix_32(bits + high)
    u = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    u = tl.minimum(u, 1.0 - 5.960464477539063e-08)
    # -log(1 - u); near 0, which gives the largest noise, by its series.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return -_log(tl.where(u < 0.03125, series, -_log(1.0 - u)))


@triton.jit
def _best_of_span(
    logits_ptr, slots_ptr, positions_ptr, keys_ptr, temperature_ptr, greedy_ptr, partial_ptr,
    vocab, stride, plane, spans,
    SPAN: tl.constexpr, LANES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    sampled = tl.load(greedy_ptr + slot) == 0
    low, high = _stream(tl.load(keys_ptr + slot), tl.load(positions_ptr + row))
    logits_ptr += row * stride
    column = tl.arange(0, LANES)[:, None] * FOLD + tl.arange(0, FOLD)[None, :]
    log2_e = 1.4426950408889634
    best = tl.full((LANES,), float("-inf"), tl.float32)
    where = tl.zeros((LANES,), tl.int32)
    # Each lane has a running softmax of its logits: lanes synchronise only at the end.
    highest = tl.full((LANES,), -1e30, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    raw_total = tl.zeros((LANES,), tl.float32)
    for begin in range(span * SPAN, tl.minimum(span * SPAN + SPAN, vocab), LANES * FOLD):
        token = begin + column
        inside = token < vocab
        x = tl.load(logits_ptr + token, inside, float("-inf")).to(tl.float32)
        scores = x
        if temperature != 1.0:
            scores = x / temperature
        if sampled:
            noisy = tl.where(inside, scores + _gumbel(low, high, token), float("-inf"))
        else:
            noisy = scores
        fold_best, fold_where = tl.max(noisy, 1, return_indices=True)
        where = tl.where(fold_best > best, begin + tl.arange(0, LANES) * FOLD + fold_where, where)
        best = tl.maximum(best, fold_best)
        above = tl.maximum(highest, tl.max(x, 1))
        lower = (highest - above) * log2_e
        raw_total = raw_total * tl.exp2(lower) + tl.sum(tl.exp2((x - above[:, None]) * log2_e), 1)
        if temperature != 1.0:
            rescaled = log2_e / temperature
            shares = tl.exp2((x - above[:, None]) * rescaled)
            total = total * tl.exp2((highest - above) * rescaled) + tl.sum(shares, 1)
        highest = above
    top = tl.max(highest, 0)
    raw = tl.sum(raw_total * tl.exp2((highest - top) * log2_e), 0)
    tempered = raw
    if temperature != 1.0:
        tempered = tl.sum(total * tl.exp2((highest - top) * (log2_e / temperature)), 0)
    winner = tl.max(best, 0)
    # The first token of those with equal scores, like argmax.
    token_of_best = tl.min(tl.where(best == winner, where, 2147483647), 0)
    at = partial_ptr + row * spans + span
    tl.store(at, winner)
    tl.store(at + plane, token_of_best.to(tl.float32))
    tl.store(at + 2 * plane, top)
    tl.store(at + 3 * plane, tempered)
    tl.store(at + 4 * plane, raw)


@triton.jit
def _best_of_row(
    logits_ptr, partial_ptr, slots_ptr, temperature_ptr, greedy_ptr, tokens_ptr, log_probs_ptr,
    rows, stride, plane, spans,
    SPANS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    inside = span < spans
    at = partial_ptr + row * spans + span
    _, where = tl.max(tl.load(at, inside, float("-inf")), 0, return_indices=True)
    token = tl.sum(tl.where(span == where, tl.load(at + plane, inside, 0.0), 0.0), 0).to(tl.int64)
    chosen = tl.load(logits_ptr + row * stride + token).to(tl.float32)
    highest = tl.load(at + 2 * plane, inside, float("-inf"))
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    peak = tl.max(highest, 0)
    total = tl.sum(tl.where(inside, tl.load(at + 3 * plane, inside, 0.0) * tl.exp((highest - peak) / temperature), 0.0))
    raw_total = tl.sum(tl.where(inside, tl.load(at + 4 * plane, inside, 0.0) * tl.exp(highest - peak), 0.0))
    tl.store(tokens_ptr + row, token)
    log_prob = (chosen - peak) / temperature - tl.log(total)
    tl.store(log_probs_ptr + row, log_prob)
    tl.store(log_probs_ptr + rows + row, chosen - peak - tl.log(raw_total))
    tl.store(log_probs_ptr + 2 * rows + row, tl.where(tl.load(greedy_ptr + slot) == 0, log_prob, 0.0))
