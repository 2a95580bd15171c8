"""Triton kernels of the fused head: softmax statistics of a chunk of logits, and its gradient. Only for CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Logits that one thread loads at once into its running softmax.
_FOLD = 2
_STATISTICS_TILE = 8192
_GRADIENT_TILE = 4096


def row_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    statistics: torch.Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
    with_entropy: bool,
) -> None:
    """Write the `RowStatistics` of `logits` [rows, vocab] to `statistics` [4, rows] float32.

    `logits.stride(0)` is a multiple of 16; elements between `vocab` and the stride may be read.
    """
    rows, vocab = logits.shape
    _row_statistics[(rows,)](
        logits, labels, statistics, vocab, logits.stride(0), statistics.stride(0), temperature, scale, softcap or 0.0,
        WITH_ENTROPY=with_entropy, HAS_CAP=softcap is not None, LANES=_STATISTICS_TILE // _FOLD, FOLD=_FOLD,
        num_warps=8,
    )  # fmt: skip


def logit_gradients(
    logits: torch.Tensor,
    d_logits: torch.Tensor,
    labels: torch.Tensor,
    log_sum_exp: torch.Tensor,
    entropy: torch.Tensor | None,
    d_log_probs: torch.Tensor,
    d_entropy: torch.Tensor | None,
    temperature: float,
    scale: float,
    softcap: float | None,
) -> None:
    """Write the gradient with respect to `logits` [rows, vocab] to `d_logits`, which may be the same tensor.

    Both have the same row stride, a multiple of 16; elements between `vocab` and the stride may be read and written.
    `labels` is [rows] int64, the other tensors are [rows] float32.
    """
    rows, vocab = logits.shape
    width = logits.stride(0)
    has_entropy = d_entropy is not None and entropy is not None
    _logit_gradients[(rows, triton.cdiv(width, _GRADIENT_TILE))](
        logits, d_logits, labels, log_sum_exp, entropy if has_entropy else log_sum_exp, d_log_probs,
        d_entropy if has_entropy else d_log_probs, vocab, width, temperature, scale, softcap or 0.0,
        WITH_ENTROPY=has_entropy, HAS_CAP=softcap is not None, TILE=_GRADIENT_TILE, num_warps=8,
    )  # fmt: skip


@triton.jit
def _tanh(x):
    """tanh by one exponential, exact to about 1e-7, without a library call."""
    return 2.0 / (1.0 + tl.exp2(-2.8853900817779268 * x)) - 1.0


@triton.jit
def _clamp_min(x, lowest: tl.constexpr):
    """Replace -inf, which would result in inf - inf; unlike tl.maximum it keeps NaN."""
    return tl.where(x < lowest, lowest, x)


@triton.jit
def _row_statistics(
    logits_ptr, labels_ptr, statistics_ptr, vocab, width, plane, temperature, scale, softcap,
    WITH_ENTROPY: tl.constexpr, HAS_CAP: tl.constexpr, LANES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    # In units of log2, since the hardware computes exp2.
    factor = 1.4426950408889634 / temperature
    if HAS_CAP:
        factor *= softcap
        inner = scale / softcap
    else:
        factor *= scale
    # Every lane has its own running softmax; they are combined at the end.
    highest = tl.full((LANES,), -1e30, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    column = tl.arange(0, LANES)[:, None] * FOLD + tl.arange(0, FOLD)[None, :]
    for begin in range(0, width, LANES * FOLD):
        x = tl.load(logits_ptr + begin + column, begin + column < width, 0.0).to(tl.float32)
        if HAS_CAP:
            x = _tanh(x * inner)
        x = _clamp_min(tl.where(begin + column < vocab, x * factor, -1e30), -1e30)
        above = tl.maximum(highest, tl.max(x, 1))
        x -= above[:, None]
        rescale = tl.exp2(highest - above)
        share = tl.exp2(x)
        if WITH_ENTROPY:
            weighted = rescale * (weighted + total * (highest - above)) + tl.sum(share * x, 1)
        total = rescale * total + tl.sum(share, 1)
        highest = above
    top = tl.max(highest, 0)
    rescale = tl.exp2(highest - top)
    ln_2 = 0.6931471805599453
    tl.store(statistics_ptr + row, top * ln_2)
    tl.store(statistics_ptr + plane + row, tl.sum(rescale * total, 0))
    if WITH_ENTROPY:
        weighted = rescale * (weighted + total * (highest - top))
        tl.store(statistics_ptr + 2 * plane + row, tl.sum(weighted, 0) * ln_2)
    label = tl.load(labels_ptr + row)
    inside = (label >= 0) & (label < vocab)
    chosen = tl.load(logits_ptr + label, inside, 0.0).to(tl.float32)
    if HAS_CAP:
        chosen = _tanh(chosen * inner)
    tl.store(statistics_ptr + 3 * plane + row, tl.where(inside, chosen * factor * ln_2, float("-inf")))


@triton.jit
def _logit_gradients(
    logits_ptr, d_logits_ptr, labels_ptr, log_sum_exp_ptr, entropy_ptr, d_log_probs_ptr, d_entropy_ptr,
    vocab, width, temperature, scale, softcap,
    WITH_ENTROPY: tl.constexpr, HAS_CAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = row * width + column
    x = tl.load(logits_ptr + at, column < width, 0.0).to(tl.float32)
    slope = scale / temperature
    factor = scale / temperature
    if HAS_CAP:
        factor = softcap / temperature
        x = _tanh(x * (scale / softcap))
    d_log_prob = tl.load(d_log_probs_ptr + row) * slope
    log_p = _clamp_min(x * factor - tl.load(log_sum_exp_ptr + row), -1e4)
    p = tl.exp2(log_p * 1.4426950408889634)
    coefficient = d_log_prob
    if WITH_ENTROPY:
        coefficient += tl.load(d_entropy_ptr + row) * slope * (log_p + tl.load(entropy_ptr + row))
    gradient = tl.where(column == tl.load(labels_ptr + row), d_log_prob, 0.0) - p * coefficient
    if HAS_CAP:
        gradient *= (1.0 - x) * (1.0 + x)
    tl.store(d_logits_ptr + at, gradient.to(d_logits_ptr.dtype.element_ty), column < width)
