"""Shared tensor functions: log-probabilities, masked statistics, padding, learning-rate schedules.

Masks are 0/1 (or non-negative weights). A masked position contributes nothing to values and gradients, even if it is
NaN or inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# Elements of one float32 work block (128 MB): the extra memory of a pass over logits of any size.
BLOCK_ELEMENTS = 2**25


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probability of each label, float32: `logits` [..., vocab], `labels` [...] → [...].

    Processes blocks of rows: apart from the result and the gradient, nothing of the size of `logits` is allocated (a
    plain `log_softmax` keeps a float32 copy). The gradient is exact; second derivatives are not supported.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels: shape {tuple(labels.shape)} does not match logits {tuple(logits.shape)}; "
            f"expected {tuple(logits.shape[:-1])}, one label per row of the vocabulary."
        )
    return _LogProbs.apply(logits, labels)


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of the softmax in nats, float32: `logits` [..., vocab] → [...].

    Uses as little memory as `logprobs_from_logits`. A logit of -inf is a token that cannot occur: it contributes 0.
    """
    return _Entropy.apply(logits)


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Sum of unmasked `values` over all positions, or over `axis`. At least float32."""
    weights, unmasked = _split_mask(values, mask)
    return _sum(unmasked * weights, axis)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Mean of unmasked `values`; 0 if all are masked. At least float32."""
    weights, unmasked = _split_mask(values, mask)
    count = _sum(weights, axis)
    return _sum(unmasked * weights, axis) / torch.where(count > 0, count, torch.ones_like(count))


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance of unmasked `values`; `unbiased` divides by n - 1. 0 for fewer than two values."""
    weights, unmasked = _split_mask(values, mask)
    variance = masked_mean((unmasked - masked_mean(values, mask)) ** 2, mask)
    if unbiased:
        count = weights.sum()
        variance = torch.where(count > 1, variance * count / (count - 1).clamp(min=1e-8), torch.zeros_like(variance))
    return variance


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """`values` with variance 1 over the mask, and mean 0 unless `shift_mean` is False; masked positions become 0."""
    weights, unmasked = _split_mask(values, mask)
    mean, variance = masked_mean(values, mask), masked_var(values, mask)
    whitened = (unmasked - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(weights != 0, whitened, torch.zeros_like(whitened))


def distributed_mean_max_min_std(
    local: torch.Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (mean, max, min, std) over the elements of all ranks, None for those not requested. A collective.

    An empty `local` contributes nothing. If it is empty on all ranks, the results are NaN, -inf, inf and 0.
    The standard deviation divides by the number of elements minus one. Without a process group, only `local` counts.
    """
    values = local.detach().to(_compute_dtype(local))
    count = _all_reduce(torch.tensor(float(values.numel()), device=values.device), "SUM")
    mean = _all_reduce(values.sum(), "SUM") / count
    is_empty = values.numel() == 0  # `max` and `min` would raise, while the other ranks wait in the collective
    highest = _all_reduce(values.new_tensor(-math.inf) if is_empty else values.max(), "MAX") if compute_max else None
    lowest = _all_reduce(values.new_tensor(math.inf) if is_empty else values.min(), "MIN") if compute_min else None
    std = None
    if compute_std:
        std = (_all_reduce((values - mean).square().sum(), "SUM") / (count - 1).clamp(min=1)).sqrt()
    return mean, highest, lowest, std


def distributed_masked_mean(local: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the unmasked elements of all ranks, 0 if there are none. A collective.

    Without a process group, only `local` counts.
    """
    weights, unmasked = _split_mask(local.detach(), mask)
    total, count = _all_reduce((unmasked * weights).sum(), "SUM"), _all_reduce(weights.sum(), "SUM")
    return total / torch.where(count > 0, count, torch.ones_like(count))


def _all_reduce(value: torch.Tensor, operation: str) -> torch.Tensor:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value, op=getattr(dist.ReduceOp, operation))
    return value


def get_response_mask(
    response_id: torch.Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """1 up to and including the first end token, 0 after: `response_id` [batch, response] → the same shape."""
    tokens = [eos_token] if isinstance(eos_token, int) else list(eos_token)
    ends = torch.tensor(tokens, dtype=response_id.dtype, device=response_id.device)
    is_end = torch.isin(response_id, ends).long()
    return (is_end.cumsum(dim=-1) - is_end == 0).to(dtype)


def pad_sequence_to_length(
    tensors: torch.Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> torch.Tensor:
    """[..., seq] → [..., max_seq_len] filled with `pad_token_id`; unchanged when already that long or longer."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad or truncate token ids and mask, both [batch, seq], to exactly `max_length` columns.

    Truncation: `left` drops the beginning, `right` the end, `middle` the centre (of an odd length the end keeps one
    more), and `error` raises a ValueError.
    """
    if truncation not in ("error", "left", "right", "middle"):
        raise ValueError(f"truncation: {truncation!r} is unknown. Use error, left, right or middle.")
    if input_ids.ndim != 2 or input_ids.shape != attention_mask.shape:
        raise ValueError(
            f"input_ids: shape {tuple(input_ids.shape)} with attention_mask {tuple(attention_mask.shape)}; "
            "both must be [batch, seq] and equal."
        )
    length = input_ids.shape[1]
    if length > max_length:
        if truncation == "error":
            raise ValueError(
                f"input_ids: {length} tokens exceed max_length={max_length}. "
                "Raise the limit, filter long rows, or set truncation to left, right or middle."
            )
        keep_first = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
        keep_last_from = length - (max_length - keep_first)
        input_ids, attention_mask = (
            torch.cat([part[:, :keep_first], part[:, keep_last_from:]], dim=1) for part in (input_ids, attention_mask)
        )
    return (
        pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
        pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
    )


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """The learning rate rises linearly from 0 over `num_warmup_steps`, then stays."""
    return LambdaLR(optimizer, lambda step: min(1.0, step / num_warmup_steps) if num_warmup_steps else 1.0, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear rise from 0 over `num_warmup_steps`, then a cosine down to `min_lr_ratio` at `num_training_steps`.

    `num_cycles` counts whole cosine waves; the default half wave ends at the minimum and stays there.
    """
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise ValueError(f"min_lr_ratio: {min_lr_ratio} is not a fraction of the learning rate. Use 0 to 1.")

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / num_warmup_steps
        progress = min(1.0, (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps))
        wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress))
        return min_lr_ratio + (1.0 - min_lr_ratio) * wave

    return LambdaLR(optimizer, factor, last_epoch)


class _LogProbs(torch.autograd.Function):
    """log softmax at one label per row; keeps the logits themselves and one number per row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_norm = torch.empty(labels.numel(), dtype=_compute_dtype(logits), device=logits.device)
        for rows, block in row_blocks(logits):
            log_norm[rows] = torch.logsumexp(block.to(log_norm.dtype), dim=-1)
        ctx.save_for_backward(logits, labels, log_norm)
        label_logits = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return label_logits.to(log_norm.dtype) - log_norm.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, log_norm = ctx.saved_tensors
        grad, upstream, targets = _flat_grad(logits), grad_output.reshape(-1, 1), labels.reshape(-1, 1)
        for rows, block in row_blocks(logits):
            derivative = (block.to(log_norm.dtype) - log_norm[rows, None]).exp_().neg_()
            derivative.scatter_add_(-1, targets[rows], torch.ones_like(log_norm[rows, None]))
            grad[rows] = _scale_rows(derivative, upstream[rows])
        return grad.view(logits.shape), None


class _Entropy(torch.autograd.Function):
    """Entropy of softmax per row; d entropy / d logit = -p (log p + entropy)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        shape = logits.shape[:-1]
        entropy = torch.empty(shape.numel(), dtype=_compute_dtype(logits), device=logits.device)
        for rows, block in row_blocks(logits):
            log_p = torch.log_softmax(block.to(entropy.dtype), dim=-1)
            entropy[rows] = -_times_probability(log_p, log_p).sum(dim=-1)
        ctx.save_for_backward(logits, entropy)
        return entropy.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        logits, entropy = ctx.saved_tensors
        grad, upstream = _flat_grad(logits), grad_output.reshape(-1, 1)
        for rows, block in row_blocks(logits):
            log_p = torch.log_softmax(block.to(entropy.dtype), dim=-1)
            grad[rows] = _scale_rows(_times_probability(log_p, log_p + entropy[rows, None]), -upstream[rows])
        return grad.view(logits.shape)


def row_blocks(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Views of at most `BLOCK_ELEMENTS` of `logits` [..., vocab] as [rows, vocab], with their slice of all rows."""
    vocab = logits.shape[-1]
    size = max(1, BLOCK_ELEMENTS // max(1, vocab))
    start = 0
    for matrix in _as_matrices(logits):
        for block in matrix.split(size):
            yield slice(start, start + block.shape[0]), block
            start += block.shape[0]


def _as_matrices(logits: torch.Tensor) -> list[torch.Tensor]:
    """Views [rows, vocab] without copies: `logits[:, :-1]` and other slices cannot be flattened, only row by row."""
    if logits.ndim <= 2 or logits.is_contiguous():
        return [logits.reshape(-1, logits.shape[-1])]
    return [matrix for part in logits.unbind(0) for matrix in _as_matrices(part)]


def _flat_grad(logits: torch.Tensor) -> torch.Tensor:
    vocab = logits.shape[-1]
    return torch.empty(logits.shape[:-1].numel(), vocab, dtype=logits.dtype, device=logits.device)


def _scale_rows(derivative: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """derivative × upstream per row; a row with upstream gradient 0 (masked) gets 0 even if its derivative is NaN."""
    return derivative.mul_(upstream).masked_fill_(upstream == 0, 0.0)


def _times_probability(log_p: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """exp(log_p) × factor, and 0 where the probability is 0 (there the factor is -inf)."""
    return torch.where(log_p == -math.inf, torch.zeros_like(log_p), log_p.exp() * factor)


def _compute_dtype(values: torch.Tensor) -> torch.dtype:
    """float32, or float64 for double input: sums over half-precision values lose their small parts."""
    return torch.promote_types(values.dtype, torch.float32)


def _split_mask(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask with the shape and dtype of the values, and the values with 0 at masked positions."""
    values = values.to(_compute_dtype(values))
    weights = mask.to(values.dtype).expand_as(values)
    return weights, torch.where(weights != 0, values, torch.zeros_like(values))


def _sum(values: torch.Tensor, axis: int | tuple[int, ...] | None) -> torch.Tensor:
    return values.sum() if axis is None else values.sum(dim=axis)
