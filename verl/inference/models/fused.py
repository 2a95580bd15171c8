"""FusedModel: decoders of the Llama shape (Llama, Mistral, Qwen2, Qwen3, SmolLM2) with few, large operations per layer.

Query, key and value are one matmul, gate and up another; between matmuls stands one kernel each (CUDA) or a few torch
operations (CPU). Which models qualify is decided by their parameters: all of them must be known here, or it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding

from verl.inference.attention.base import AttentionStep
from verl.inference.memory import Region
from verl.inference.models import torch_ops
from verl.inference.models.layout import Layout
from verl.inference.tensor_parallel import SINGLE, TensorParallel
from verl.inference.weights import Shard
from verl.models.heads import wide_product

__all__ = ["FusedModel", "unsupported_reason"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Rotary kinds whose angles depend on the position alone.
_ROTARY_KINDS = ("default", "linear", "llama3", "yarn")


def unsupported_reason(config: Any, max_length: int) -> str | None:
    """Why a model of this HF config cannot take the fused path; None if it can."""
    if config.model_type not in _FAMILIES:
        return f"{config.model_type} is none of {', '.join(_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    rotary = config.rope_parameters.get("rope_type", "default")
    if rotary not in _ROTARY_KINDS or config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return f"its rotary embedding is {config.rope_parameters}"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < max_length:
        return f"its sliding window of {window} tokens is shorter than max_model_len={max_length}"
    return Layout(config).mismatch()


@dataclass(slots=True)
class _Layer:
    """One layer's weights; views into the region, merged where a matmul is."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class FusedModel:
    """An InferenceModel. Weights are uninitialised until they are loaded through `named_weights`."""

    def __init__(
        self,
        config: Any,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: TensorParallel = SINGLE,
    ) -> None:
        reason = unsupported_reason(config, max_length)
        if reason is not None:
            raise ValueError(f"the fused path does not run this model: {reason}. Use the generic one.")
        self.layout = Layout(config, parallel)
        self._parallel = parallel
        self.dtype = dtype
        self.num_layers, self.vocab_size = config.num_hidden_layers, config.vocab_size
        self.num_heads, self.num_kv_heads = self.layout.heads, self.layout.kv_heads
        self.head_dim = self.layout.head_dim
        self.eps = config.rms_norm_eps
        self.region = Region(self.layout.bytes(dtype), device)
        self.device = self.region.bytes.device
        turned_below = torch_ops.LARGE_WEIGHT if self.device.type == "cpu" else 0
        self._weights, merged = self.layout.carve(self.region.bytes, dtype, turned_below)
        self._layers = [self._layer(merged, index) for index in range(self.num_layers)]
        self._embedding = merged["model.embed_tokens.weight"]
        self._head = merged.get("lm_head.weight", self._embedding)
        self._norm = merged["model.norm.weight"]
        self._rotary = _rotary_table(config, max_length, self.device)
        self._ops: Any = torch_ops
        if self.device.type == "cuda":
            from verl.inference.kernels import pointwise

            self._ops = pointwise

    def named_weights(self) -> dict[str, torch.Tensor]:
        return dict(self._weights)

    def noted_experts(self, slots: int) -> torch.Tensor:
        raise ValueError("return_routed_experts: this model has no experts. Leave it out.")

    def shards(self) -> dict[str, Shard]:
        return self.layout.shards()

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        ops, linear, eps = self._ops, self._ops.linear, self.eps
        residual = self._embedded(token_ids)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, following, strict=True)):
            attended = self._attend(index, linear(x, layer.qkv, layer.qkv_bias), positions, step)
            x = self._parallel.sum_(linear(attended, layer.out, layer.out_bias))
            x = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._parallel.sum_(linear(ops.gated_silu(linear(x, layer.gate_up)), layer.down))
            x = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # float32, whatever the weights are: rounded logits are not the trainer's.
        exact = hidden.dtype == torch.float32
        logits = self._ops.linear(hidden, self._head) if exact else wide_product(hidden, self._head.t())
        return self._parallel.joined(logits) if self.layout.vocab_is_cut else logits

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the tokens it has; the others' rows are zero in the sum."""
        if not self.layout.vocab_is_cut:
            return embedding(token_ids, self._embedding)
        local = token_ids - self._parallel.rank * len(self._embedding)
        absent = (local < 0) | (local >= len(self._embedding))
        found = embedding(local.masked_fill(absent, 0), self._embedding)
        return self._parallel.sum_(found.masked_fill_(absent.unsqueeze(1), 0.0))

    def _attend(self, index: int, qkv: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """`qkv` [T, (heads + 2 kv) * dim] → [T, heads * dim]; the new keys and values are in the cache after it."""
        scale = self.head_dim**-0.5
        norms = self._layers[index].head_norms
        heads = qkv.view(len(qkv), -1, self.head_dim)
        if self._ops is not torch_ops:
            self._ops.rotate_and_cache(qkv, positions, self._rotary, step.slots, *step.kv_cache[index], norms)
            # mypy: only backends of this device reach here, and they have `attend`.
            attend: Any = step.backend
            return attend.attend(index, heads[:, : self.num_heads], step, scale).flatten(1)
        turned, value = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if norms is not None:
            query, key = turned.split([self.num_heads, self.num_kv_heads], dim=1)
            query, key = torch_ops.rms_norm(query, norms[0], norms[2]), torch_ops.rms_norm(key, norms[1], norms[2])
            turned = torch.cat([query, key], dim=1)
        turned = torch_ops.rotated(turned, *self._angles(positions, step))
        query, key = turned.split([self.num_heads, self.num_kv_heads], dim=1)
        return step.backend(index, query, key, value, step, scale).flatten(1)

    def _angles(self, positions: torch.Tensor, step: AttentionStep) -> tuple[torch.Tensor, torch.Tensor]:
        if "angles" not in step.scratch:
            cos, sin = self._rotary[positions].unsqueeze(1).chunk(2, dim=-1)
            step.scratch["angles"] = (cos, sin)
        return step.scratch["angles"]

    def _layer(self, merged: dict[str, torch.Tensor], index: int) -> _Layer:
        at = f"model.layers.{index}."
        norms = None
        if at + "self_attn.q_norm.weight" in merged:
            norms = (merged[at + "self_attn.q_norm.weight"], merged[at + "self_attn.k_norm.weight"], self.eps)
        return _Layer(
            input_norm=merged[at + "input_layernorm.weight"],
            qkv=merged[at + "self_attn.qkv.weight"],
            qkv_bias=merged.get(at + "self_attn.qkv.bias"),
            head_norms=norms,
            out=merged[at + "self_attn.o_proj.weight"],
            # Added once: what the ranks compute is summed up.
            out_bias=merged.get(at + "self_attn.o_proj.bias") if self._parallel.rank == 0 else None,
            post_norm=merged[at + "post_attention_layernorm.weight"],
            gate_up=merged[at + "mlp.gate_up.weight"],
            down=merged[at + "mlp.down_proj.weight"],
        )


def _rotary_table(config: Any, length: int, device: torch.device) -> torch.Tensor:
    """cos and sin of every position, [length, dim] float32: the model family's own angles."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config=config)
    cos, sin = rotary(torch.zeros(1), torch.arange(length).unsqueeze(0))
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float().to(device)
