"""The critic's loss: squared error, with the prediction held near the one the advantages were computed from."""

from __future__ import annotations

import torch

from verl.algos.aggregate import agg_loss
from verl.algos.returns import keep


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the larger of the squared errors of `vpreds` and of `vpreds` clipped to `values` ± `cliprange_value`.

    All tensors [batch, response]; returns the loss and the share of tokens on which the clipped error is the larger.
    """
    mask = response_mask.bool()
    predicted, target, before = keep(vpreds, mask), keep(returns, mask), keep(values, mask)
    error = (predicted - target) ** 2
    held = predicted.clamp(before - cliprange_value, before + cliprange_value)
    clipped_error = (held - target) ** 2
    loss = 0.5 * agg_loss(torch.maximum(error, clipped_error), mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)
    clipfrac = ((clipped_error > error) & mask).sum() / mask.sum().clamp(min=1)
    return loss, clipfrac
