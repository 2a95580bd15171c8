"""InferenceModel: the interface of models, from packed tokens to hidden states, with weights at fixed addresses."""

from __future__ import annotations

from typing import Protocol

import torch

from verl.inference.attention import AttentionStep
from verl.inference.lora import ModelAdapters
from verl.inference.memory import Region
from verl.inference.weights import WeightShard

__all__ = ["InferenceModel"]


class InferenceModel(Protocol):
    """A causal language model with a paged KV cache. T: number of packed tokens of all sequences of a step."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    region: Region
    """The memory of all weights."""
    adapters: ModelAdapters | None
    """The slots of LoRA adapters; None: the model has none."""

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Last hidden states (after the final norm). token_ids, positions: [T] int64; returns [T, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden]; returns [N, vocab] in the model's dtype."""
        ...

    def shards(self) -> dict[str, WeightShard]:
        """Shards by HF name, of the tensors that are split over tensor-parallel ranks."""
        ...

    def record_experts(self, slots: int) -> torch.Tensor:
        """Return a table [slots, layers, k] to which every later pass writes its tokens' experts, at their KV slots."""
        ...

    def named_weights(self) -> dict[str, torch.Tensor]:
        """All weights by HF name: tensors, or views of merged tensors, at addresses that never change."""
        ...
