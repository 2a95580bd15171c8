"""Log-probs and entropies computed from hidden states in chunks, without materializing all logits (fused linear
cross-entropy).

The backward pass recomputes the logits of each chunk and replaces them by their gradient, so a call saves only its
inputs and a few numbers per row. With a frozen head, the forward pass already computes the gradient of each log-prob
with respect to its hidden state: the loss only scales it, and the backward pass needs no logits. On CUDA the passes
over logits are Triton kernels, elsewhere plain torch. `d_x` is the gradient of the loss with respect to `x`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from verl.models.logits import (
    MIN_LOG_PROB,
    LogitAdjustment,
    RowStatistics,
    empty_statistics,
    has_kernels,
    logit_chunks,
    logits_at_labels,
    rows_per_chunk,
    scale_logits_,
    wide_dtype,
    write_statistics,
)


def label_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    *,
    bias: torch.Tensor | None = None,
    adjust: LogitAdjustment | None = None,
    chunk_rows: int | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    entropy_has_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probs of `labels` [N] at `hidden` [N, H] with the head `weight` [vocab, H], and entropies [N].

    With `labels` [N, K], the log-probs are [N, K], too. Labels outside the vocabulary have log-prob -inf. Inputs are
    multiplied in their dtype; logits and results are float32 (float64 for float64 inputs). `chunk_rows`: rows of a
    chunk. `adjust` is applied before `temperature`. `hidden`, `weight` and `bias` get gradients; second derivatives
    are not supported. With `vocab_group`, whose ranks divide the vocabulary, `weight` and `bias` are this rank's part
    (possibly empty), labels are relative to its start, and hidden states and their gradients are the same on every
    rank. Without `entropy_has_gradient`, the entropies are not differentiable.

    Gradients through a frozen head are computed in the forward pass and rounded twice to the dtype of `hidden`, except
    with several labels per row, with `vocab_group`, or if the entropies have gradients.
    """
    adjust, group = adjust or LogitAdjustment(), vocab_group
    rows = chunk_rows or rows_per_chunk(len(hidden), len(weight), wide_dtype(hidden.dtype).itemsize, hidden.device.type)
    frozen = torch.is_grad_enabled() and hidden.requires_grad
    frozen &= not (weight.requires_grad or (bias is not None and bias.requires_grad))
    if frozen and group is None and labels.dim() == 1 and not (with_entropy and entropy_has_gradient):
        return _FrozenHead.apply(hidden, weight, bias, labels, temperature, adjust, with_entropy, rows)
    log_probs, entropy = _LabelStatistics.apply(
        hidden, weight, bias, labels, temperature, adjust, with_entropy, rows, group
    )
    return log_probs, entropy if entropy is None or entropy_has_gradient else entropy.detach()


def chunk_gradients_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sum_exp: torch.Tensor,
    entropy: torch.Tensor | None,
    d_log_probs: torch.Tensor,
    d_entropy: torch.Tensor | None,
    temperature: float,
    adjust: LogitAdjustment,
) -> torch.Tensor:
    """Replace `logits` [rows, vocab] (float32 or float64) by their gradient; `labels` and `d_log_probs` are [rows] or
    [rows, K], all others [rows].

    With p the softmax: d_log_prob (1[label] - p) - d_entropy p (log p + entropy), times the derivative of adjustment
    and temperature. `log_sum_exp` and `entropy` are those of the whole vocabulary, also if `logits` are a part of it.
    """
    x = scale_logits_(logits, temperature, adjust)
    slope = None
    if adjust.softcap is not None:
        slope = (x * (temperature / adjust.softcap)).square_().neg_().add_(1.0)
    d_log_probs = d_log_probs.reshape(len(x), -1) * (adjust.scale / temperature)
    x.sub_(log_sum_exp[:, None])
    if d_entropy is None or entropy is None:
        x.exp_().mul_(-d_log_probs.sum(dim=1, keepdim=True))
    else:
        d_entropy = d_entropy * (adjust.scale / temperature)
        p = x.clamp_(min=MIN_LOG_PROB).exp()
        x.add_(entropy[:, None]).mul_(d_entropy[:, None]).add_(d_log_probs.sum(dim=1, keepdim=True)).mul_(p).neg_()
    _add_at_labels_(x, labels, d_log_probs)
    return x if slope is None else x.mul_(slope)


def kernel_gradients(
    logits: torch.Tensor,
    d_logits: torch.Tensor,
    labels: torch.Tensor,
    log_sum_exp: torch.Tensor,
    entropy: torch.Tensor | None,
    d_log_probs: torch.Tensor,
    d_entropy: torch.Tensor | None,
    temperature: float,
    adjust: LogitAdjustment,
) -> None:
    """Like `chunk_gradients_`, with a Triton kernel; writes to `d_logits`, which may be `logits`.

    The kernel supports one label per row. With several labels, it runs without labels, and the gradients at the label
    columns are computed separately and scattered over its result.
    """
    from verl.models.fused_head_kernel import logit_gradients

    statistics = (labels, log_sum_exp, entropy, d_log_probs, d_entropy)
    label_gradients = None
    if labels.dim() > 1:
        label_gradients = gradients_at_labels(logits, *statistics, temperature, adjust)
        no_label = labels.new_full((len(labels),), -1)
        statistics = (no_label, log_sum_exp, entropy, d_log_probs.sum(dim=1), d_entropy)
    logit_gradients(logits, d_logits, *statistics, temperature, adjust.scale, adjust.softcap)
    if label_gradients is not None:
        columns, gradients = label_gradients
        d_logits.scatter_(1, columns, gradients.to(d_logits.dtype))


def gradients_at_labels(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sum_exp: torch.Tensor,
    entropy: torch.Tensor | None,
    d_log_probs: torch.Tensor,
    d_entropy: torch.Tensor | None,
    temperature: float,
    adjust: LogitAdjustment,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns of the labels, and the result of `chunk_gradients_` in these columns: [rows, K] each.

    `logits` [rows, vocab]; `labels` [rows, K]. The columns are the sorted labels, with 0 for labels outside the
    vocabulary. Both terms of a gradient are added before it is rounded to the dtype of the matmuls: for nearly certain
    tokens, -p and the gradient of the label almost cancel.
    """
    inside = (labels >= 0) & (labels < logits.shape[1])
    # The gradient of a column that occurs several times is summed at its first occurrence, and copied to the others.
    columns, order = torch.where(inside, labels, 0).sort(dim=1)
    first = torch.searchsorted(columns, columns)
    label_columns = torch.where(inside.gather(1, order), first, -1)
    values, d_labels = logits.gather(1, columns), d_log_probs.gather(1, order)
    gradients = chunk_gradients_(values, label_columns, log_sum_exp, entropy, d_labels, d_entropy, temperature, adjust)
    return columns, gradients.gather(1, first)


def _add_at_labels_(x: torch.Tensor, labels: torch.Tensor, values: torch.Tensor) -> None:
    """x[row, label] += value for `labels` [rows] or [rows, K] inside the vocabulary; `values` [rows, K]."""
    labels = labels.reshape(len(x), -1)
    inside = (labels >= 0) & (labels < x.shape[1])
    x.scatter_add_(1, torch.where(inside, labels, 0), torch.where(inside, values, 0.0).to(x.dtype))


class _LabelStatistics(torch.autograd.Function):
    """The autograd function of `label_statistics`: (hidden, weight, bias, …) -> (log_probs, entropy or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperature: float,
        adjust: LogitAdjustment,
        with_entropy: bool,
        chunk_rows: int,
        vocab_group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, labels = hidden.contiguous(), labels.contiguous()
        out = empty_statistics(hidden, weight)
        label_logits = out.new_full(labels.shape, -torch.inf) if labels.dim() > 1 else None
        for rows, logits in logit_chunks(hidden, weight, bias, chunk_rows):
            chunk_labels = labels[rows]
            if label_logits is not None:
                label_logits[rows] = logits_at_labels(logits, chunk_labels, temperature, adjust)
                chunk_labels = chunk_labels.new_full((len(chunk_labels),), -1)
            write_statistics(out[:, rows], logits, chunk_labels, temperature, adjust, with_entropy)
        statistics = RowStatistics(*out)
        if vocab_group is not None:
            statistics = statistics.all_reduce(vocab_group)
            if label_logits is not None:
                dist.all_reduce(label_logits, dist.ReduceOp.MAX, vocab_group)
        entropy = statistics.entropy() if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, labels, statistics.log_sum_exp(), entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.adjust, ctx.chunk_rows, ctx.vocab_group = temperature, adjust, chunk_rows, vocab_group
        log_probs = statistics.log_probs() if label_logits is None else statistics.log_probs_of(label_logits)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs: torch.Tensor | None, d_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, labels, log_sum_exp, entropy = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        totals = _GradientSums(hidden, weight, bias, needed, one_chunk=len(hidden) <= ctx.chunk_rows)
        d_log_probs = log_sum_exp.new_zeros(labels.shape) if d_log_probs is None else d_log_probs.contiguous()
        d_entropy = None if d_entropy is None else d_entropy.contiguous()
        for rows, logits in logit_chunks(hidden, weight, bias, ctx.chunk_rows):
            statistics = (
                labels[rows],
                log_sum_exp[rows],
                None if entropy is None else entropy[rows],
                d_log_probs[rows],
                None if d_entropy is None else d_entropy[rows],
                ctx.temperature,
                ctx.adjust,
            )
            totals.add_chunk(rows, logits, *statistics)
        d_hidden, d_weight, d_bias = totals.gradients()
        if ctx.vocab_group is not None and d_hidden is not None:
            dist.all_reduce(d_hidden, group=ctx.vocab_group)
        return (d_hidden, d_weight, d_bias, None, None, None, None, None, None)


class _FrozenHead(torch.autograd.Function):
    """`label_statistics` of a head without gradients: (hidden, weight, bias, …) -> (log_probs, entropy or None).

    The forward pass computes the gradient of each log-prob with respect to its hidden state. The loss only scales it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperature: float,
        adjust: LogitAdjustment,
        with_entropy: bool,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, labels = hidden.contiguous(), labels.contiguous()
        out = empty_statistics(hidden, weight)
        totals = _GradientSums(hidden, weight, bias, (True, False, False), one_chunk=True)
        # Gradients of nearly certain tokens are below the normal numbers of float16.
        ctx.scale = 2.0**10 if hidden.dtype == torch.float16 else 1.0
        d_log_probs = out.new_full((len(hidden),), ctx.scale)
        for rows, logits in logit_chunks(hidden, weight, bias, chunk_rows):
            kept = logits if has_kernels(logits) else logits.clone()  # without kernels, `logits` are overwritten
            write_statistics(out[:, rows], logits, labels[rows], temperature, adjust, with_entropy)
            log_sum_exp = RowStatistics(*out[:, rows]).log_sum_exp()
            totals.add_chunk(rows, kept, labels[rows], log_sum_exp, None, d_log_probs[rows], None, temperature, adjust)
        statistics = RowStatistics(*out)
        entropy = statistics.entropy() if with_entropy else None
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(totals.gradients()[0])
        ctx.set_materialize_grads(False)
        return statistics.log_probs(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
        (gradients,) = ctx.saved_tensors
        d_hidden = None
        if d_log_probs is not None:  # `out`: no float32 tensor of this size
            d_hidden = torch.mul(gradients, (d_log_probs / ctx.scale)[:, None], out=torch.empty_like(gradients))
        return (d_hidden, *[None] * 7)


class _GradientSums:
    """Accumulates the gradients of hidden, weight and bias over chunks; gradients that are not `needed` are None."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needed: tuple[bool, bool, bool],
        one_chunk: bool,
    ) -> None:
        self._hidden, self._weight = hidden, weight
        # Sums over several chunks are float32 and rounded once.
        wide = weight.dtype if one_chunk else torch.promote_types(weight.dtype, torch.float32)
        self._d_hidden = torch.empty_like(hidden) if needed[0] else None
        self._d_weight = torch.empty_like(weight, dtype=wide) if needed[1] else None
        self._d_bias = torch.zeros_like(bias, dtype=torch.promote_types(wide, torch.float32)) if needed[2] else None
        self._started = False
        self._buffer: torch.Tensor | None = None

    def add_chunk(self, rows: slice, logits: torch.Tensor, *statistics: Any) -> None:
        """Add the gradients of a chunk; `statistics` are the other arguments of `chunk_gradients_`."""
        if has_kernels(logits):
            d_logits = self._d_logits(logits)
            kernel_gradients(logits, d_logits, *statistics)
        else:
            d_logits = chunk_gradients_(logits, *statistics).to(self._hidden.dtype)
        self._add(rows, d_logits)

    def _d_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a tensor to which the gradient of these logits is written, in the dtype of the matmuls: `logits`
        itself if it has this dtype, otherwise a buffer that all chunks share."""
        if logits.dtype == self._hidden.dtype:
            return logits
        if self._buffer is None:  # the first chunk is the largest
            self._buffer = self._hidden.new_empty(len(logits), logits.stride(0))
        return self._buffer[: len(logits), : logits.shape[1]]

    def _add(self, rows: slice, d_logits: torch.Tensor) -> None:
        """Add the products of `d_logits`, the gradients of the logits of `rows`."""
        if self._d_hidden is not None:
            torch.mm(d_logits, self._weight, out=self._d_hidden[rows])
        if self._d_weight is not None:
            _add_product(self._d_weight, d_logits.t(), self._hidden[rows], beta=1.0 if self._started else 0.0)
        if self._d_bias is not None:
            self._d_bias.add_(d_logits.sum(dim=0, dtype=self._d_bias.dtype))
        self._started = True

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias; zeros if there was no chunk (an empty batch)."""
        for total in (self._d_hidden, self._d_weight):
            if total is not None and not self._started:
                total.zero_()
        dtype = self._weight.dtype
        sums = (None if total is None else total.to(dtype) for total in (self._d_weight, self._d_bias))
        return (self._d_hidden, *sums)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float) -> None:
    """total = beta * total + left @ right, multiplied in the dtype of the factors and added in that of `total`."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)
