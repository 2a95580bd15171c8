"""From one loss per token to one number, the same however the batch is cut.

A sequence is a trajectory. Where one has several rows (see `rows_of_trajectories`), each row is its part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import torch

from verl.algos.returns import keep

Count: TypeAlias = float | torch.Tensor

_TRAJECTORY_TOKENS: ContextVar[torch.Tensor | None] = ContextVar("trajectory_tokens", default=None)


@contextmanager
def rows_of_trajectories(trajectory_tokens: torch.Tensor | None) -> Iterator[None]:
    """Within it the rows given to `agg_loss` and `global_share` are parts of trajectories with so many model tokens in
    all, [batch]; None: each row is a trajectory.

    Losses keep their signature: what a row is part of concerns only those who divide by sequences.
    """
    before = _TRAJECTORY_TOKENS.set(trajectory_tokens)
    try:
        yield
    finally:
        _TRAJECTORY_TOKENS.reset(before)


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """One number from `loss_mat` [batch, response]; tokens where `loss_mask` is 0 contribute nothing.

    token-mean               sum over tokens / tokens
    token-sum                sum over tokens
    seq-mean-token-sum       mean over sequences of the sum over their tokens
    seq-mean-token-mean      mean over sequences of the mean over their tokens
    seq-mean-token-sum-norm  mean over sequences of the sum over their tokens / `loss_scale_factor`
                             (a constant such as the longest response allowed: Dr. GRPO, arXiv 2503.20783)

    `batch_num_tokens` and `global_batch_size` are the tokens (in the mask) and sequences (trajectories with any) of the
    whole optimizer step over all ranks; the results of its parts then add up to the loss of the whole. Without them
    this part is the whole. `dp_size` multiplies the result, for engines that average over that many ranks.
    """
    loss_mask = loss_mask.bool()
    tokens, sequences = _counts(loss_mask, batch_num_tokens, global_batch_size)
    row_sums = keep(loss_mat, loss_mask).sum(dim=-1)
    if loss_agg_mode == "token-mean":
        loss = row_sums.sum() / _nonzero(tokens)
    elif loss_agg_mode == "token-sum":
        loss = row_sums.sum()
    elif loss_agg_mode == "seq-mean-token-sum":
        loss = row_sums.sum() / _nonzero(sequences)
    elif loss_agg_mode == "seq-mean-token-mean":
        whole = _trajectory_tokens(loss_mask)
        sequence_tokens = loss_mask.sum(dim=-1) if whole is None else whole
        loss = (row_sums / _nonzero(sequence_tokens)).sum() / _nonzero(sequences)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        if not loss_scale_factor:
            raise ValueError(
                "loss_scale_factor: seq-mean-token-sum-norm divides by a constant that does not depend on the batch; "
                "none was given. Pass e.g. the longest response allowed (actor_rollout_ref.actor.loss_scale_factor)."
            )
        loss = row_sums.sum() / loss_scale_factor / _nonzero(sequences)
    else:
        raise ValueError(f"loss_agg_mode: {loss_agg_mode!r} is not known. Use one of {', '.join(_NORMALISED_BY)}.")
    return loss.to(row_sums.dtype) * dp_size


def global_share(
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    batch_num_tokens: Count,
    global_batch_size: Count,
    dp_size: int = 1,
) -> torch.Tensor:
    """What to multiply a loss by that was aggregated within its own part, to make it that part's share of the whole.

    For losses that call `agg_loss` themselves (every policy loss, a user's own included):
    `agg_loss(m, mask, mode) * global_share(mask, mode, tokens, sequences)` is `agg_loss` with these global counts.
    """
    if loss_agg_mode not in _NORMALISED_BY:
        raise ValueError(f"loss_agg_mode: {loss_agg_mode!r} is not known. Use one of {', '.join(_NORMALISED_BY)}.")
    loss_mask = loss_mask.bool()
    own_tokens, own_sequences = _counts(loss_mask, None, None)
    tokens, sequences = _counts(loss_mask, batch_num_tokens, global_batch_size)
    shares = {
        "tokens": own_tokens / _nonzero(tokens),
        "sequences": own_sequences / _nonzero(sequences),
        "nothing": torch.ones_like(own_tokens),
    }
    return shares[_NORMALISED_BY[loss_agg_mode]] * dp_size


_NORMALISED_BY = {
    "token-mean": "tokens",
    "token-sum": "nothing",
    "seq-mean-token-sum": "sequences",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum-norm": "sequences",
}
LOSS_AGG_MODES = tuple(_NORMALISED_BY)


def _counts(mask: torch.Tensor, tokens: Count | None, sequences: Count | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and sequences to divide by: as given, else those of the mask. float64: exact for any count."""
    tokens = mask.sum() if tokens is None else tokens
    if sequences is None:
        sequences = count_sequences(mask, _trajectory_tokens(mask))
    return _on(mask.device, tokens), _on(mask.device, sequences)


def count_sequences(mask: torch.Tensor, trajectory_tokens: torch.Tensor | None) -> torch.Tensor:
    """How many trajectories rows with this mask [batch, response] are: each its share of its trajectory's tokens."""
    if trajectory_tokens is None:
        return mask.any(dim=-1).sum()
    return (mask.sum(dim=-1).double() / _nonzero(trajectory_tokens)).sum()


def _trajectory_tokens(mask: torch.Tensor) -> torch.Tensor | None:
    tokens = _TRAJECTORY_TOKENS.get()
    if tokens is not None and tokens.shape != mask.shape[:1]:
        raise ValueError(
            f"agg_loss: a mask of {mask.shape[0]} rows, in a loss on {len(tokens)} rows of trajectories. Aggregate all"
            " rows at once; what is to be left out has mask 0."
        )
    return tokens


def _on(device: torch.device, count: Count) -> torch.Tensor:
    """A number is written by the device itself: copying it there would make the host wait."""
    if isinstance(count, torch.Tensor):
        return count.to(device, torch.float64)
    return torch.full((), count, dtype=torch.float64, device=device)


def _nonzero(count: torch.Tensor) -> torch.Tensor:
    """A part without any token has the loss 0, not 0 / 0."""
    return torch.where(count > 0, count, torch.ones_like(count))
