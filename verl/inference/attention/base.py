"""What one forward pass tells attention: where each token's KV goes, and which blocks each sequence may look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = ["AttentionBackend", "AttentionStep", "KVCache"]

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim], contiguous."""


class AttentionBackend(Protocol):
    """Paged attention by one set of kernels."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: AttentionStep,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write key and value into the layer's cache at `step.slots`, then attend causally.

        query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim]; returns [T, heads, head_dim].
        A token sees itself and the `window - 1` tokens before it (None: all). Scores are softcap·tanh(score/softcap).
        """
        ...


@dataclass(slots=True)
class AttentionStep:
    """The layout of one forward pass over T tokens: prefill chunks first, one after the other, then the decodes."""

    kv_cache: list[KVCache]
    """One pair per layer."""
    backend: AttentionBackend
    slots: torch.Tensor
    """[T] int64: cache slot of each token, block * block_size + offset."""
    num_prefill_tokens: int
    query_starts: torch.Tensor
    """[P + 1] int32: where each prefill chunk starts among the tokens."""
    prefill_lengths: torch.Tensor
    """[P] int32: KV length of each prefilled sequence after its chunk."""
    prefill_tables: torch.Tensor
    """[P, W] int32: its blocks."""
    decode_lengths: torch.Tensor
    """[D] int32: KV length of each decoded sequence, the fed token included."""
    decode_tables: torch.Tensor
    """[D, W] int32: its blocks."""
    scratch: dict[Any, Any] = field(default_factory=dict)
    """What a backend works out once for all layers of this pass."""
