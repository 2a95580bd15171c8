"""Paged attention on CUDA by our Triton kernels. Every launch depends on shapes alone, so CUDA graphs may hold it."""

from __future__ import annotations

import torch

from verl.inference.attention.base import AttentionStep
from verl.inference.kernels.paged_attention import decode_attention, varlen_attention
from verl.inference.kernels.pointwise import write_cache

__all__ = ["TritonAttention"]


class TritonAttention:
    """An AttentionBackend; `attend` alone serves models that have written the cache themselves."""

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
        write_cache(key, value, step.slots, *step.kv_cache[layer])
        return self.attend(layer, query, step, scale, window, softcap)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        step: AttentionStep,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """`query` [T, heads, head_dim] → the same shape; heads and dims contiguous, rows at any stride."""
        keys, values = step.kv_cache[layer]
        prefilled = step.num_prefill_tokens
        parts = []
        if prefilled:
            parts.append(
                varlen_attention(
                    query[:prefilled], keys, values, step.query_starts, step.prefill_tables, step.prefill_lengths,
                    scale, window, softcap,
                )
            )  # fmt: skip
        if len(step.decode_lengths):
            parts.append(
                decode_attention(
                    query[prefilled:], keys, values, step.decode_tables, step.decode_lengths, scale, window, softcap
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
