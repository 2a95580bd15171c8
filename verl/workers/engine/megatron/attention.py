"""Attention inside Megatron-Core's layers: packed, causal, exchanged for heads where a context group shares the tokens.

Core itself sees one plain sequence [T, 1, H]. What it hands to every layer unread, in the pass and when the layer is
computed again, says where the sequences in it begin: nothing is kept between passes, so several may be in flight.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from verl.models.attention import attend
from verl.models.packing import Packing


class PackedTokens(PackedSeqParams):
    """What a micro-batch tells every layer; to Core's own code it is no packed sequence."""

    def __init__(self, packing: Packing, routes: Any = None) -> None:
        """`routes` are what routers of a mixture are told (`routers.Routes`)."""
        super().__init__(qkv_format="sbhd")
        self.packing = packing
        self.routes = routes


class PackedAttention(nn.Module):
    """Core's `core_attention` without parameters, as torch's and flash-attn's kernels or plain torch compute it."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        """`layer_number` counts from 1 over all pipeline stages; `config` is a CoreConfig."""
        super().__init__()
        self._window = config.arch.windows[layer_number - 1]
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedTokens,
        **_: Any,
    ) -> torch.Tensor:
        """query [T, 1, heads, dim], key and value [T, 1, kv heads, dim] -> [T, 1, heads * dim]."""
        query, key, value = (part[:, 0] for part in (query, key, value))
        out = attend(query, key, value, packed_seq_params.packing, self._scale, self._window)
        return out.flatten(1)[:, None]
