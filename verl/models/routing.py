"""The experts that routers of a Hugging Face model select: record them, and compute the weights of given experts.

`routed_experts` [tokens, layers, k] contains expert indices, or `unrouted` for layers without experts and for tokens
whose experts are unknown; in a replay the router then selects by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def route_dtype(experts: int) -> torch.dtype:
    """Return the smallest dtype for the indices of this number of experts, and `unrouted`."""
    return torch.uint8 if experts <= unrouted(torch.uint8) else torch.int16


def unrouted(dtype: torch.dtype) -> int:
    """Return the value that means "no expert"."""
    return torch.iinfo(dtype).max


def empty_routes(config: Any) -> torch.Tensor:
    """Return `routed_experts` of no tokens [0, layers, k] for a model with this Hugging Face config."""
    text = config.get_text_config()
    if not getattr(text, "num_experts_per_tok", None):
        raise ValueError(f"return_routed_experts: a model of type {config.model_type} has no experts. Leave it out.")
    return torch.empty((0, text.num_hidden_layers, text.num_experts_per_tok), dtype=route_dtype(text.num_experts))


def routers(hf: nn.Module) -> dict[int, Any]:
    """Return the routers of a model by layer index; they return (logits, weights [T, k], experts [T, k])."""
    by_layer = {}
    for name, module in hf.named_modules():
        layer = _LAYER.search(name)
        if layer is not None and type(module).__name__.endswith("TopKRouter"):
            by_layer[int(layer[1])] = module
    return by_layer


def record_routes(hf: nn.Module, record: Callable[[int, torch.Tensor], None]) -> None:
    """Call `record(layer, experts [T, k])` for every layer with experts in all later passes."""
    for layer, router in routers(hf).items():
        router.register_forward_hook(lambda _, __, output, layer=layer: record(layer, output[-1]))


def expert_weights(router: Any, hidden: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return the weights [T, k] float32 of these experts [T, k] by a router of Mixtral, Qwen2-MoE or Qwen3-MoE."""
    logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights
