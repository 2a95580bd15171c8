"""A Hugging Face config as Megatron-Core has to know it; what Core cannot express is refused by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma")
_SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = _DENSE + _SPARSE
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Fields that must have one of these values, where a config has them at all.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": _ACTIVATIONS,
    "attention_dropout": (0, 0.0, None),
    "router_jitter_noise": (0, 0.0, None),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class Experts:
    """Of the sparse layers of a model."""

    count: int
    per_token: int
    ffn: int
    """Rows of one expert's gate."""
    normalized: bool
    """Whether the weights of the chosen experts add up to 1."""
    layers: tuple[bool, ...]
    """Of each layer, whether it has experts; the others are dense."""
    shared_ffn: int = 0
    """Of an expert that sees every token, weighed by a gate of its own; 0: there is none."""


@dataclass(frozen=True)
class CoreArchitecture:
    """What decides the shapes of a model and how it computes, in Core's terms."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    labels: int
    """Of a sequence classifier."""
    tied: bool
    norm_eps: float
    norm_adds_one: bool
    """Weights of norms are what they differ from 1 by (Gemma)."""
    qk_norm: bool
    qkv_bias: bool
    linear_bias: bool
    """Of all other linear maps of a layer."""
    activation: Literal["silu", "gelu_pytorch_tanh"]
    """Of the gate: every family has gated maps."""
    embedding_scale: float
    rope: Mapping[str, Any]
    """`rope_type`, `rope_theta` and what else transformers takes for it."""
    windows: tuple[int | None, ...]
    """Of each layer, how many tokens back it looks; None: at all of them."""
    experts: Experts | None

    @classmethod
    def of(cls, hf_config: Any) -> CoreArchitecture:
        """ValueError, naming the field, for a config that Core cannot express."""
        family = hf_config.model_type
        if family not in FAMILIES:
            raise _refusal("model_type", family, FAMILIES)
        for field, allowed in _ONLY.items():
            value = getattr(hf_config, field, None if None in allowed else allowed[0])
            if value not in allowed:
                raise _refusal(field, value, allowed)
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        mlp_bias = bool(getattr(hf_config, "mlp_bias", False))
        if attention_bias != mlp_bias:
            field = "attention_bias" if hasattr(hf_config, "attention_bias") else "mlp_bias"
            raise _refusal(field, getattr(hf_config, field), ("the same as for the MLP: Core has one switch for both",))
        qwen2_bias = family == "qwen2" or (family == "qwen2_moe" and hf_config.qkv_bias)
        return cls(
            family=family,
            layers=hf_config.num_hidden_layers,
            hidden=hf_config.hidden_size,
            heads=hf_config.num_attention_heads,
            kv_heads=hf_config.num_key_value_heads or hf_config.num_attention_heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads,
            ffn=hf_config.intermediate_size,
            vocab=hf_config.vocab_size,
            labels=hf_config.num_labels,
            tied=bool(hf_config.tie_word_embeddings),
            norm_eps=hf_config.rms_norm_eps,
            norm_adds_one=family == "gemma",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            qkv_bias=attention_bias or qwen2_bias,
            linear_bias=attention_bias,
            activation=hf_config.hidden_act,
            embedding_scale=math.sqrt(hf_config.hidden_size) if family == "gemma" else 1.0,
            rope=dict(hf_config.rope_parameters),
            windows=_windows(hf_config),
            experts=_experts(hf_config) if family in _SPARSE else None,
        )

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


def padded_vocab(vocab: int, tp_size: int) -> int:
    """Rows of the embedding over all ranks: each gets the same number, a multiple of 128."""
    return math.ceil(vocab / (128 * tp_size)) * 128 * tp_size


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise _refusal("layer_types", unknown, ("full_attention", "sliding_attention"))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _experts(config: Any) -> Experts:
    count, layers = config.num_experts, range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        everywhere = tuple(True for _ in layers)
        return Experts(count, config.num_experts_per_tok, config.intermediate_size, True, everywhere)
    sparse = tuple(
        layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0 for layer in layers
    )
    shared = config.shared_expert_intermediate_size if config.model_type == "qwen2_moe" else 0
    normalized = bool(config.norm_topk_prob)
    return Experts(count, config.num_experts_per_tok, config.moe_intermediate_size, normalized, sparse, shared)


def _refusal(field: str, value: Any, allowed: tuple[Any, ...]) -> ValueError:
    choices = ", ".join(map(str, allowed))
    return ValueError(
        f"config.json: {field} is {value!r}, which the Megatron engine cannot express ({choices}). Use strategy=fsdp "
        "for this model."
    )
