"""Operations on per-token tensors [batch, response] with a mask: masking, returns, whitening, loss aggregation.

A response may contain observations (tool output, mask 0) between two turns. They are skipped: the model token before an
observation is followed by the first model token after it, so inserting observations changes no value of a model token.
Suffix `_TB`: [time, batch].

Aggregation is independent of how a batch is split into parts. A sequence is a trajectory; it may consist of several
rows (see `rows_of_trajectories`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import torch

Count: TypeAlias = float | torch.Tensor

_TRAJECTORY_TOKENS: ContextVar[torch.Tensor | None] = ContextVar("trajectory_tokens", default=None)


def apply_mask(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` in at least float32, with 0 (also instead of NaN or inf) where the boolean `mask` is False."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def at_last_token(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return float32 [batch, response]: each of `values` [batch] at the last position where `mask` is 1; 0 in rows
    without one."""
    width = mask.shape[1]
    placed = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    positions = torch.arange(1, width + 1, device=mask.device)
    last = (mask.bool() * positions).amax(dim=-1) - 1 if width else mask.new_full((len(mask),), -1)
    rows = torch.nonzero(last >= 0).squeeze(-1)
    placed[rows, last[rows]] = values.to(placed)[rows]
    return placed


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the sum of rewards from each model token on, discounted per model token; 0 where `mask` is 0.

    All tensors [batch, response].
    """
    mask = mask.bool()
    if gamma == 1.0:
        sums = apply_mask(rewards, mask).flip(-1).cumsum(-1).flip(-1)
    else:
        mask_TB = mask.t().contiguous()
        factors_TB = model_token_factors(mask_TB, gamma, 1.0, rewards)
        sums = batch_major(reverse_scan(time_major(rewards, mask_TB), factors_TB))
    return sums.masked_fill_(~mask, 0.0)


def reverse_scan(inputs_TB: torch.Tensor, factors_TB: torch.Tensor) -> torch.Tensor:
    """x[t] = inputs[t] + factors[t] * x[t + 1], in place, one operation over the batch per time step.

    Time is the first dimension so that each step reads and writes contiguous memory.
    """
    rows, factors = inputs_TB.unbind(0), factors_TB.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        torch.addcmul(rows[t], rows[t + 1], factors[t], out=rows[t])
    return inputs_TB


def time_major(values: torch.Tensor, mask_TB: torch.Tensor) -> torch.Tensor:
    """Copy [batch, time] to a contiguous [time, batch], with 0 where the mask is False."""
    return apply_mask(values.t().contiguous(), mask_TB)


def batch_major(values_TB: torch.Tensor) -> torch.Tensor:
    return values_TB.t().contiguous()


def model_token_factors(mask_TB: torch.Tensor, on_model: float, elsewhere: float, like: torch.Tensor) -> torch.Tensor:
    """Return `on_model` where the mask is True and `elsewhere` otherwise, in the dtype of `like`, at least float32."""
    scalars = torch.tensor([on_model, elsewhere], dtype=torch.promote_types(like.dtype, torch.float32))
    return torch.where(mask_TB, *scalars.to(mask_TB.device))


def whiten_(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalize `values` [batch, response] in place to mean 0 and variance 1 over the mask (sample variance, n - 1).

    `values` must be 0 where the boolean `mask` is False, and stay 0 there. Same result as `masked_whiten` with a
    quarter of the passes over memory, and sums in float64.
    """
    count = mask.sum()
    mean = values.sum(dtype=torch.float64) / count.clamp(min=1)
    values.sub_(mean.to(values.dtype)).masked_fill_(~mask, 0.0)
    variance = values.square().sum(dtype=torch.float64) / (count - 1).clamp(min=1)
    return values.mul_(torch.rsqrt(variance + 1e-8).to(values.dtype))


@contextmanager
def rows_of_trajectories(trajectory_tokens: torch.Tensor | None) -> Iterator[None]:
    """Context in which the rows passed to `agg_loss` and `global_share` are parts of trajectories.

    `trajectory_tokens` [batch]: number of model tokens of each row's whole trajectory; None: each row is a trajectory.
    It is a context, not an argument, so that loss functions (also those of users) keep their signature.
    """
    token = _TRAJECTORY_TOKENS.set(trajectory_tokens)
    try:
        yield
    finally:
        _TRAJECTORY_TOKENS.reset(token)


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """Aggregate `loss_mat` [batch, response] to a scalar; tokens where `loss_mask` is 0 contribute nothing.

    token-mean               sum over tokens / tokens
    token-sum                sum over tokens
    seq-mean-token-sum       mean over sequences of the sum over their tokens
    seq-mean-token-mean      mean over sequences of the mean over their tokens
    seq-mean-token-sum-norm  mean over sequences of the sum over their tokens / `loss_scale_factor`
                             (a constant such as the maximum response length: Dr. GRPO, arXiv 2503.20783)

    `batch_num_tokens` and `global_batch_size` are the numbers of tokens (in the mask) and of sequences (with at least
    one token) of the whole optimizer step over all ranks; the losses of the micro-batches then add up to the loss of
    the step. By default they are counted in this batch. `dp_size` multiplies the result, for engines that average
    gradients over that many ranks.
    """
    loss_mask = loss_mask.bool()
    tokens, sequences = _counts(loss_mask, batch_num_tokens, global_batch_size)
    row_sums = apply_mask(loss_mat, loss_mask).sum(dim=-1)
    if loss_agg_mode == "token-mean":
        loss = row_sums.sum() / _nonzero(tokens)
    elif loss_agg_mode == "token-sum":
        loss = row_sums.sum()
    elif loss_agg_mode == "seq-mean-token-sum":
        loss = row_sums.sum() / _nonzero(sequences)
    elif loss_agg_mode == "seq-mean-token-mean":
        trajectory_tokens = _trajectory_tokens(loss_mask)
        sequence_tokens = loss_mask.sum(dim=-1) if trajectory_tokens is None else trajectory_tokens
        loss = (row_sums / _nonzero(sequence_tokens)).sum() / _nonzero(sequences)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        if not loss_scale_factor:
            raise ValueError(
                "loss_scale_factor: not set, but seq-mean-token-sum-norm divides by it. Pass a constant, e.g. the "
                "maximum response length (actor_rollout_ref.actor.loss_scale_factor)."
            )
        loss = row_sums.sum() / loss_scale_factor / _nonzero(sequences)
    else:
        raise ValueError(f"loss_agg_mode: {loss_agg_mode!r} is not known. Use one of {', '.join(_NORMALIZED_BY)}.")
    return loss.to(row_sums.dtype) * dp_size


def global_share(
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    batch_num_tokens: Count,
    global_batch_size: Count,
    dp_size: int = 1,
) -> torch.Tensor:
    """Return the factor that converts the loss of a micro-batch, aggregated with its own counts, to its share of the
    loss of the step.

    Policy losses (also those of users) call `agg_loss` without global counts:
    `agg_loss(m, mask, mode) * global_share(mask, mode, tokens, sequences)` equals `agg_loss` with these counts.
    """
    if loss_agg_mode not in _NORMALIZED_BY:
        raise ValueError(f"loss_agg_mode: {loss_agg_mode!r} is not known. Use one of {', '.join(_NORMALIZED_BY)}.")
    loss_mask = loss_mask.bool()
    local_tokens, local_sequences = _counts(loss_mask, None, None)
    tokens, sequences = _counts(loss_mask, batch_num_tokens, global_batch_size)
    shares = {
        "tokens": local_tokens / _nonzero(tokens),
        "sequences": local_sequences / _nonzero(sequences),
        "none": torch.ones_like(local_tokens),
    }
    return shares[_NORMALIZED_BY[loss_agg_mode]] * dp_size


_NORMALIZED_BY = {
    "token-mean": "tokens",
    "token-sum": "none",
    "seq-mean-token-sum": "sequences",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum-norm": "sequences",
}
LOSS_AGG_MODES = tuple(_NORMALIZED_BY)


def _counts(mask: torch.Tensor, tokens: Count | None, sequences: Count | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of tokens and sequences to divide by, counted in the mask if None, as (exact) float64."""
    tokens = mask.sum() if tokens is None else tokens
    if sequences is None:
        sequences = count_sequences(mask, _trajectory_tokens(mask))
    return _to_device(mask.device, tokens), _to_device(mask.device, sequences)


def count_sequences(mask: torch.Tensor, trajectory_tokens: torch.Tensor | None) -> torch.Tensor:
    """Return the number of sequences in rows with this mask [batch, response].

    With `trajectory_tokens` [batch], a row counts as its share of its trajectory's model tokens.
    """
    if trajectory_tokens is None:
        return mask.any(dim=-1).sum()
    return (mask.sum(dim=-1).double() / _nonzero(trajectory_tokens)).sum()


def _trajectory_tokens(mask: torch.Tensor) -> torch.Tensor | None:
    tokens = _TRAJECTORY_TOKENS.get()
    if tokens is not None and tokens.shape != mask.shape[:1]:
        raise ValueError(
            f"agg_loss: the mask has {mask.shape[0]} rows, but the micro-batch has {len(tokens)}. Aggregate all rows at"
            " once, and set the mask of excluded rows to 0."
        )
    return tokens


def _to_device(device: torch.device, count: Count) -> torch.Tensor:
    """Return a count as float64 on the device; `torch.full` avoids a copy from the host, which would synchronize."""
    if isinstance(count, torch.Tensor):
        return count.to(device, torch.float64)
    return torch.full((), count, dtype=torch.float64, device=device)


def _nonzero(count: torch.Tensor) -> torch.Tensor:
    """Replace 0 by 1: the loss of a batch without tokens is 0, not 0 / 0."""
    return torch.where(count > 0, count, torch.ones_like(count))
