"""Rotary angles of packed tokens for Megatron-Core's attention, computed by transformers' functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Rope types whose frequencies depend on the longest sequence of a pass.
_BY_LENGTH = ("dynamic", "longrope")


class Rotary(nn.Module):
    """Position ids -> angles. Replaces Core's rotary embedding, which supports one sequence starting at 0 only."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        self._config = hf_config
        self._by_length = hf_config.rope_parameters["rope_type"] in _BY_LENGTH
        frequencies, scaling = _frequencies(hf_config)
        self.register_buffer("frequencies", frequencies, persistent=False)
        head_dim = _head_dim(hf_config)
        if scaling != 1.0 and 2 * len(frequencies) != head_dim:
            raise ValueError(
                f"config.json: rope_parameters rotates {2 * len(frequencies)} of {head_dim} dimensions and scales them,"
                " which the Megatron engine does not support. Use strategy=fsdp for this model."
            )
        # Some rope types scale rotated queries and keys. Core's attention only rotates them; scaling both equals
        # scaling their product.
        self.softmax_scale: float = head_dim**-0.5 * scaling**2

    def forward(self, position_ids: torch.Tensor, longest: int | None = None) -> torch.Tensor:
        """[1, T] -> float32 [T, 1, 1, dim]; `longest`: length of the longest sequence of the pass."""
        frequencies = self.frequencies
        if self._by_length and longest is not None:
            frequencies = _frequencies(self._config, longest)[0].to(position_ids.device)
        angles = position_ids[0, :, None].float() * frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None]


def _frequencies(config: Any, longest: int | None = None) -> tuple[torch.Tensor, float]:
    """Return the angle per position [dim / 2], and the scale of cosines and sines."""
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=longest)
    rotated = int(_head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, rotated, 2).float() / rotated), 1.0


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
