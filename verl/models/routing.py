"""Which experts tokens go through: read from the routers of a Hugging Face model, and told to them.

`routed_experts` [tokens, layers, k] is an expert's number, or `unrouted`: a layer without experts, or a token that
nobody has seen pass. There a router that is told goes by its own choice.
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
    """The smallest type that has the numbers of so many experts, and `unrouted`."""
    return torch.uint8 if experts <= unrouted(torch.uint8) else torch.int16


def unrouted(dtype: torch.dtype) -> int:
    """The number that no expert has."""
    return torch.iinfo(dtype).max


def unknown_routes(config: Any) -> torch.Tensor:
    """[0, layers, k]: of no token, for a model with this Hugging Face config."""
    text = config.get_text_config()
    if not getattr(text, "num_experts_per_tok", None):
        raise ValueError(f"return_routed_experts: a model of type {config.model_type} has no experts. Leave it out.")
    return torch.empty((0, text.num_hidden_layers, text.num_experts_per_tok), dtype=route_dtype(text.num_experts))


def routers(hf: nn.Module) -> dict[int, Any]:
    """The routers of a model by layer, counted from 0; they give (logits, weights [T, k], experts [T, k])."""
    found = {}
    for name, module in hf.named_modules():
        layer = _LAYER.search(name)
        if layer is not None and type(module).__name__.endswith("TopKRouter"):
            found[int(layer[1])] = module
    return found


def note_routes(hf: nn.Module, note: Callable[[int, torch.Tensor], None]) -> None:
    """Calls `note(layer, experts [T, k])` for every layer with experts, in each pass from now on."""
    for layer, router in routers(hf).items():
        router.register_forward_hook(lambda _, __, found, layer=layer: note(layer, found[-1]))


def expert_weights(router: Any, hidden: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[T, k] float32: what a router of Mixtral, Qwen2-MoE or Qwen3-MoE weighs these experts [T, k] by."""
    logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights
