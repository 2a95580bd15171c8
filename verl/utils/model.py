"""Helpers for models: position ids and masks of inputs, changes of the configuration, parameter count."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return position ids [..., seq] for an attention mask [..., seq] of 0 and 1.

    Only attended tokens are counted: the first one, and left padding before it, have position 0.
    """
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def create_random_mask(
    input_ids: torch.Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> torch.Tensor:
    """Return a random attention mask [batch, seq]: left padding, valid tokens, right padding.

    The ratios are relative to `seq`. At least one token of every row is valid. Uses torch's global generator.
    """
    import torch

    if not 0 <= min_ratio_of_valid_token <= max_ratio_of_valid_token <= 1 or not 0 <= max_ratio_of_left_padding <= 1:
        raise ValueError(
            f"create_random_mask: min_ratio_of_valid_token={min_ratio_of_valid_token},"
            f" max_ratio_of_valid_token={max_ratio_of_valid_token},"
            f" max_ratio_of_left_padding={max_ratio_of_left_padding}. Ratios must be from 0 to 1, and the minimum must"
            " not exceed the maximum."
        )
    rows, length = input_ids.shape
    min_valid = max(1, round(min_ratio_of_valid_token * length))
    max_valid = max(min_valid, int(max_ratio_of_valid_token * length))
    valid = torch.randint(min_valid, max_valid + 1, (rows, 1))
    padding = torch.randint(0, int(max_ratio_of_left_padding * length) + 1, (rows, 1))
    start = torch.minimum(padding, length - valid)
    position = torch.arange(length)
    return ((position >= start) & (position < start + valid)).to(device=input_ids.device, dtype=torch.long)


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set fields of a model's configuration in place; a dict is merged into a nested configuration or dict."""
    for name, value in override_config_kwargs.items():
        nested = getattr(module_config, name, None)
        if isinstance(value, Mapping) and nested is not None and not isinstance(nested, Mapping):
            update_model_config(nested, value)
        elif isinstance(value, Mapping) and isinstance(nested, Mapping):
            setattr(module_config, name, {**nested, **value})
        else:
            setattr(module_config, name, value)


def print_model_size(model: torch.nn.Module, name: str | None = None) -> None:
    """Log the number of parameters of a model."""
    count = sum(parameter.numel() for parameter in model.parameters())
    scale, unit = next(((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if count >= size), (1, ""))
    logger.info("%s: %.4g%s parameters", name or type(model).__name__, count / scale, unit)
