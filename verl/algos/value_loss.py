"""The critic's loss: squared error, with the prediction held near the one the advantages were computed from."""

from __future__ import annotations

import torch

from verl.algos.aggregate import agg_loss
from verl.algos.returns import keep
from verl.utils.torch_functional import masked_mean


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
    loss = 0.5 * agg_loss(
        torch.maximum(error, clipped_error), response_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor
    )
    with torch.no_grad():
        clipfrac = masked_mean((clipped_error > error).float(), mask)
    return loss, clipfrac
