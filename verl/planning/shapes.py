"""The shape of a model, as far as its memory goes: asked of the empty model that an engine would build."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from verl.config.context_length import context_limit
from verl.models.core.architecture import CoreArchitecture
from verl.models.loading import ModelKind, empty_model, read_config
from verl.models.lora import Adapters
from verl.planning.core_shapes import CoreShape
from verl.workers.engine.fsdp.sharding import outermost_layers


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one transformer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of the MLP a token goes through; of all its experts together where there are several."""
    vocab: int
    tied: bool
    layer_parameters: int
    """Of all layers together."""
    root_parameters: int
    """Those outside the layers (embeddings, head), which are gathered for the whole of a pass."""
    largest_parameters: int
    """Of the largest tensor: an embedding, or all experts of a layer."""
    adapter_parameters: int | None = None
    """Of LoRA; None without."""
    gated: bool = True
    """Whether the MLP multiplies two projections."""
    norms_per_layer: int = 2
    norm_in_float32: bool = False
    """Whether a norm's weight is applied before the cast back to half precision (Gemma)."""
    head_norms: bool = False
    """Whether queries and keys have norms of their own (Qwen3)."""
    core: CoreShape | None = None
    """As the megatron engine divides it; None where it cannot."""
    positions: int | None = None
    """Tokens that a sequence may have; None: not told."""

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.root_parameters

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @classmethod
    def of_folder(cls, folder: str, model_config: Any, kind: ModelKind = "causal_lm") -> ModelShape | None:
        """Of the model in a local folder, with the overrides and adapters of its configuration; None where its config
        has not the usual names."""
        trusted = model_config.trust_remote_code
        config = read_config(folder, trusted, model_config.override_config)
        shape = cls.of_config(config, kind, trusted)
        rank = model_config["lora_rank"] if "lora_rank" in model_config else 0
        if shape is None or not rank:
            return shape
        model = empty_model(config, kind, torch.bfloat16, trusted)
        Adapters(model, kind, model_config)
        learning = sum(value.numel() for value in model.parameters() if value.requires_grad)
        return replace(shape, adapter_parameters=learning)

    @classmethod
    def of_config(cls, config: Any, kind: ModelKind = "causal_lm", trusted: bool = False) -> ModelShape | None:
        """Of the model that transformers builds from a config; None where the usual names are missing."""
        text = config.get_text_config()
        if not all(hasattr(text, name) for name in ("hidden_size", "num_attention_heads", "vocab_size")):
            return None
        model = empty_model(config, kind, torch.bfloat16, trusted)
        layers = outermost_layers(model)
        norms = [part.weight.numel() for part in layers[0].modules() if "Norm" in type(part).__name__]
        inside = sum(value.numel() for layer in layers for value in layer.parameters())
        sizes = [value.numel() for value in model.parameters()]
        hidden, heads = text.hidden_size, text.num_attention_heads
        inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
        if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
            inner = (getattr(text, "moe_intermediate_size", None) or inner) * (text.num_experts_per_tok or 1)
        return cls(
            hidden=hidden,
            layers=len(layers),
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or hidden // heads,
            intermediate=inner,
            vocab=text.vocab_size,
            tied=bool(text.tie_word_embeddings),
            layer_parameters=inside,
            root_parameters=sum(sizes) - inside,
            largest_parameters=max(sizes),
            gated=any("gate" in name for name, _ in layers[0].named_modules()),
            norms_per_layer=norms.count(hidden),
            norm_in_float32=text.model_type.startswith("gemma"),
            head_norms=any(size != hidden for size in norms),
            core=_core(text),
            positions=context_limit(text.to_dict()),
        )


def _core(config: Any) -> CoreShape | None:
    try:
        return CoreShape.of(CoreArchitecture.of(config))
    except ValueError:  # whoever wants that engine for it is told why (`planning.check`)
        return None
