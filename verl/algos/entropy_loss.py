"""The entropy of the policy as one number; subtracted from the loss it keeps the policy exploring."""

from __future__ import annotations

import torch

from verl.algos.aggregate import agg_loss
from verl.utils.torch_functional import entropy_from_logits


def compute_entropy_loss(
    logits: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """Entropy of `logits` [batch, response, vocab] aggregated over the model tokens of `response_mask`."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)
