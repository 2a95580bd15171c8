"""Sums over the future of each token, carried through tokens the model did not write.

A response may hold observations (tool output, mask 0) between two turns. They take no step in time: the token before
an observation is followed by the model's first token after it. Inserting observations changes no model token's value.
"""

from __future__ import annotations

import torch


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Reward from each model token on, discounted per model token: all [batch, response], 0 where `mask` is 0."""
    mask = mask.bool()
    if gamma == 1.0:
        sums = keep(rewards, mask).flip(-1).cumsum(-1).flip(-1)
    else:
        mask_TB = mask.t().contiguous()
        sums = batch_major(scan_back(time_major(rewards, mask_TB), where_model(mask_TB, gamma, 1.0, rewards)))
    return sums.masked_fill_(~mask, 0.0)


def scan_back(inputs_TB: torch.Tensor, factors_TB: torch.Tensor) -> torch.Tensor:
    """x[t] = inputs[t] + factors[t] * x[t + 1], in place: one operation over the batch per step of time.

    Time is the first dimension so that each step reads and writes contiguous memory.
    """
    rows, factors = inputs_TB.unbind(0), factors_TB.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        torch.addcmul(rows[t], rows[t + 1], factors[t], out=rows[t])
    return inputs_TB


def keep(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` in at least float32, and 0 where the boolean `mask` is off, whatever stood there."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def time_major(values: torch.Tensor, mask_TB: torch.Tensor) -> torch.Tensor:
    """[batch, time] → a new contiguous [time, batch], 0 where the mask is off."""
    return keep(values.t().contiguous(), mask_TB)


def batch_major(values_TB: torch.Tensor) -> torch.Tensor:
    return values_TB.t().contiguous()


def where_model(mask_TB: torch.Tensor, on_model: float, elsewhere: float, like: torch.Tensor) -> torch.Tensor:
    """One number on model tokens and another on the rest; dtype as `like`, at least float32."""
    scalars = torch.tensor([on_model, elsewhere], dtype=torch.promote_types(like.dtype, torch.float32))
    return torch.where(mask_TB, *scalars.to(mask_TB.device))
