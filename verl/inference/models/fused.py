"""FusedModel: Llama-shaped decoders (Llama, Mistral, Qwen2, Qwen3, SmolLM2) with few, large operations per layer.

Query, key and value are one matmul, gate and up another; between two matmuls there is one kernel (CUDA) or a few torch
operations (CPU). A model is supported only if `WeightLayout` contains all of its parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding

from verl.inference.attention import AttentionStep
from verl.inference.lora import AdaptedLayer, AdapterGroup, AdapterOptions, ModelAdapters
from verl.inference.low_rank import LowRankProduct
from verl.inference.memory import Region
from verl.inference.models import torch_ops
from verl.inference.tensor_parallel import SINGLE, TensorParallel
from verl.inference.weights import WeightShard, padded
from verl.models.logits import wide_product

__all__ = ["FusedModel", "WeightLayout", "unsupported_reason"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Types of rotary embeddings whose angles depend only on the position.
_ROTARY_KINDS = ("default", "linear", "llama3", "yarn")


def unsupported_reason(config: Any, max_length: int) -> str | None:
    """Why FusedModel cannot run this HF config; None if it can."""
    if config.model_type not in _FAMILIES:
        return f"{config.model_type} is not one of {', '.join(_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    rotary = config.rope_parameters.get("rope_type", "default")
    if rotary not in _ROTARY_KINDS or config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return f"its rotary embedding is {config.rope_parameters}"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < max_length:
        return f"its sliding window of {window} tokens is shorter than max_model_len={max_length}"
    return WeightLayout(config).mismatch()


@dataclass(slots=True)
class _Layer:
    """One layer's weights: views into the region, merged per matmul."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_adapters: AdapterGroup | None
    out_adapters: AdapterGroup | None
    gate_up_adapters: AdapterGroup | None
    down_adapters: AdapterGroup | None


class FusedModel:
    """An InferenceModel. Weights are uninitialised until they are loaded through `named_weights`."""

    def __init__(
        self,
        config: Any,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: TensorParallel = SINGLE,
        adapters: AdapterOptions | None = None,
    ) -> None:
        reason = unsupported_reason(config, max_length)
        if reason is not None:
            raise ValueError(f"FusedModel does not support this model: {reason}. Use GenericModel.")
        self.layout = WeightLayout(config, parallel, adapters)
        self._parallel = parallel
        self.dtype = dtype
        self.num_layers, self.vocab_size = config.num_hidden_layers, config.vocab_size
        self.num_heads, self.num_kv_heads = self.layout.heads, self.layout.kv_heads
        self.head_dim = self.layout.head_dim
        self.eps = config.rms_norm_eps
        self.region = Region(self.layout.bytes(dtype), device)
        self.device = self.region.bytes.device
        transpose_below = torch_ops.LARGE_WEIGHT if self.device.type == "cpu" else 0
        self._weights, merged = self.layout.split_buffer(self.region.bytes, dtype, transpose_below)
        groups = self.layout.adapter_groups(merged)
        self.adapters = None if adapters is None else ModelAdapters(groups.values(), adapters)
        self._layers = [self._layer(merged, index, groups) for index in range(self.num_layers)]
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

    def record_experts(self, slots: int) -> torch.Tensor:
        raise ValueError("return_routed_experts: this model has no experts. Set it to false.")

    def shards(self) -> dict[str, WeightShard]:
        return self.layout.shards()

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        ops, linear, eps = self._ops, self._ops.linear, self.eps
        residual = self._embed(token_ids)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, following, strict=True)):
            qkv, adapted = _split(linear(x, layer.qkv, layer.qkv_bias), layer.qkv_adapters, step)
            attended = self._attend(index, qkv, adapted, positions, step)
            x, adapted = self._sum(*_split(linear(attended, layer.out, layer.out_bias), layer.out_adapters, step))
            x = ops.add_rms_norm(x, residual, layer.post_norm, eps, adapted)
            gate_up = _split(linear(x, layer.gate_up), layer.gate_up_adapters, step)
            x, adapted = self._sum(*_split(linear(ops.gated_silu(*gate_up), layer.down), layer.down_adapters, step))
            x = ops.add_rms_norm(x, residual, next_norm, eps, adapted)
        return x

    def _sum(self, x: torch.Tensor, adapted: LowRankProduct | None) -> tuple[torch.Tensor, LowRankProduct | None]:
        """Sum the partial products of tensor-parallel ranks, together with those of adapters."""
        if self._parallel.size > 1 and adapted is not None:
            x, adapted = adapted.add_to_(x), None
        return self._parallel.all_reduce_(x), adapted

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # float32 for weights of any dtype: the trainer's logits are not rounded either.
        exact = hidden.dtype == torch.float32
        logits = self._ops.linear(hidden, self._head) if exact else wide_product(hidden, self._head.t())
        return self._parallel.all_gather(logits) if self.layout.vocab_is_sharded else logits

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, hidden]. If the vocabulary is sharded, ranks sum rows that are zero outside of their shard."""
        if not self.layout.vocab_is_sharded:
            return embedding(token_ids, self._embedding)
        local = token_ids - self._parallel.rank * len(self._embedding)
        absent = (local < 0) | (local >= len(self._embedding))
        rows = embedding(local.masked_fill(absent, 0), self._embedding)
        return self._parallel.all_reduce_(rows.masked_fill_(absent.unsqueeze(1), 0.0))

    def _attend(
        self,
        index: int,
        qkv: torch.Tensor,
        adapted: LowRankProduct | None,
        positions: torch.Tensor,
        step: AttentionStep,
    ) -> torch.Tensor:
        """`qkv` [T, (heads + 2 kv) * dim] → [T, heads * dim]; writes the new keys and values to the cache.

        `adapted` is added to `qkv`.
        """
        scale = self.head_dim**-0.5
        norms = self._layers[index].head_norms
        heads = qkv.view(len(qkv), -1, self.head_dim)
        if self._ops is not torch_ops:
            self._ops.rotate_and_cache(qkv, positions, self._rotary, step.slots, *step.kv_cache[index], norms, adapted)
            # Only TritonAttention is used on CUDA; the protocol has no `attend`.
            attend: Any = step.backend
            return attend.attend(index, heads[:, : self.num_heads], step, scale).flatten(1)
        if adapted is not None:
            adapted.add_to_(qkv)
        query_key, value = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if norms is not None:
            query, key = query_key.split([self.num_heads, self.num_kv_heads], dim=1)
            query, key = torch_ops.rms_norm(query, norms[0], norms[2]), torch_ops.rms_norm(key, norms[1], norms[2])
            query_key = torch.cat([query, key], dim=1)
        query_key = torch_ops.rotated(query_key, *self._angles(positions, step))
        query, key = query_key.split([self.num_heads, self.num_kv_heads], dim=1)
        return step.backend(index, query, key, value, step, scale).flatten(1)

    def _angles(self, positions: torch.Tensor, step: AttentionStep) -> tuple[torch.Tensor, torch.Tensor]:
        if "angles" not in step.scratch:
            cos, sin = self._rotary[positions].unsqueeze(1).chunk(2, dim=-1)
            step.scratch["angles"] = (cos, sin)
        return step.scratch["angles"]

    def _layer(self, merged: dict[str, torch.Tensor], index: int, groups: dict[str, AdapterGroup]) -> _Layer:
        prefix = f"model.layers.{index}."
        norms = None
        if prefix + "self_attn.q_norm.weight" in merged:
            norms = (merged[prefix + "self_attn.q_norm.weight"], merged[prefix + "self_attn.k_norm.weight"], self.eps)
        return _Layer(
            input_norm=merged[prefix + "input_layernorm.weight"],
            qkv=merged[prefix + "self_attn.qkv.weight"],
            qkv_bias=merged.get(prefix + "self_attn.qkv.bias"),
            head_norms=norms,
            out=merged[prefix + "self_attn.o_proj.weight"],
            # On rank 0 only: the ranks' outputs are summed.
            out_bias=merged.get(prefix + "self_attn.o_proj.bias") if self._parallel.rank == 0 else None,
            post_norm=merged[prefix + "post_attention_layernorm.weight"],
            gate_up=merged[prefix + "mlp.gate_up.weight"],
            down=merged[prefix + "mlp.down_proj.weight"],
            qkv_adapters=groups.get(prefix + "self_attn.qkv.weight"),
            out_adapters=groups.get(prefix + "self_attn.o_proj.weight"),
            gate_up_adapters=groups.get(prefix + "mlp.gate_up.weight"),
            down_adapters=groups.get(prefix + "mlp.down_proj.weight"),
        )


def _split(
    output: torch.Tensor, adapters: AdapterGroup | None, step: AttentionStep
) -> tuple[torch.Tensor, LowRankProduct | None]:
    """Return the first columns of a matmul's output and the adapters' part of them; the other columns are `x A^T`."""
    if adapters is None:
        return output, None
    outputs = adapters.outputs
    return output[:, :outputs], adapters.product(output[:, outputs:], step.unused_adapters)


def _rotary_table(config: Any, length: int, device: torch.device) -> torch.Tensor:
    """cos and sin of every position, [length, dim] float32, by the implementation of transformers."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config=config)
    cos, sin = rotary(torch.zeros(1), torch.arange(length).unsqueeze(0))
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float().to(device)


_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class _Part:
    """A weight under its HF name, and the shard of it on this rank."""

    name: str
    full: tuple[int, ...]
    shard: WeightShard | None = None
    of_adapters: bool = False
    """Memory for adapters, which is not a weight of the HF model."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.shard is None:
            return self.full
        return (*self.full[: self.shard.dim], self.shard.length, *self.full[self.shard.dim + 1 :])


class WeightLayout:
    """Placement of the weights in one buffer: merged tensors and the HF tensors they consist of, on this rank."""

    def __init__(self, config: Any, parallel: TensorParallel = SINGLE, adapters: AdapterOptions | None = None) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._config, self._parallel, self._adapters = config, parallel, adapters
        self._merged: dict[str, list[_Part]] = {}
        size = parallel.size
        for name, count in {"attention heads": heads, "intermediate size": config.intermediate_size}.items():
            if count % size:
                raise ValueError(f"tensor_model_parallel_size: {size} does not divide the model's {name} ({count}).")
        if max(kv_heads, size) % min(kv_heads, size):
            raise ValueError(
                f"tensor_model_parallel_size: {size} and the model's {kv_heads} key/value heads: one must divide the"
                " other."
            )
        self.heads, self.kv_heads = heads // size, max(1, kv_heads // size)
        # A vocabulary that does not divide evenly is replicated on every rank.
        self.vocab_is_sharded = size > 1 and config.vocab_size % size == 0
        self._add_weights()
        if adapters is not None:
            self._add_adapters(adapters)

    def shards(self) -> dict[str, WeightShard]:
        """Shards by HF name, of the tensors that are split over ranks."""
        shards = {part.name: part.shard for parts in self._merged.values() for part in parts if part.shard is not None}
        if self._config.tie_word_embeddings and _EMBEDDING in shards:
            shards["lm_head.weight"] = shards[_EMBEDDING]
        return shards

    def mismatch(self) -> str | None:
        """The first parameter whose name or shape differs between this layout and transformers' module, or None."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(self._config)
        expected = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        covered = {part.name: part.full for parts in self._merged.values() for part in parts}
        different = sorted(expected.items() ^ covered.items())
        return f"parameter {different[0][0]!r} has an unexpected name or shape" if different else None

    def bytes(self, dtype: torch.dtype) -> int:
        """Size of the buffer in bytes."""
        return sum(padded(_elements(parts) * dtype.itemsize) for parts in self._merged.values())

    def split_buffer(
        self, buffer: torch.Tensor, dtype: torch.dtype, transpose_below: int = 0
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return (tensors by HF name, merged tensors by name) as views into `buffer` (uint8).

        Matrices of fewer than `transpose_below` elements are stored column-major (but not embeddings, which are looked
        up by row).
        """
        named: dict[str, torch.Tensor] = {}
        merged: dict[str, torch.Tensor] = {}
        start = 0
        for name, parts in self._merged.items():
            size = _elements(parts) * dtype.itemsize
            columns = parts[0].shape[1:]
            flat = buffer[start : start + size].view(dtype)
            if columns and flat.numel() < transpose_below and name != _EMBEDDING:
                merged[name] = flat.view(*columns, -1).t()
            else:
                merged[name] = flat.view(-1, *columns)
            start += padded(size)
            row = 0
            for part in parts:
                if not part.of_adapters:
                    named[part.name] = merged[name][row : row + part.shape[0]]
                row += part.shape[0]
        if self._config.tie_word_embeddings:
            named["lm_head.weight"] = named[_EMBEDDING]
        return named, merged

    def _add_weights(self) -> None:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        # Qwen2 has biases on query, key and value without a config field; attention_bias adds one to `o_proj` too.
        attention_bias = bool(getattr(config, "attention_bias", False))
        qkv_bias = attention_bias or config.model_type == "qwen2"
        vocabulary = self._even_shard(0, config.vocab_size) if self.vocab_is_sharded else None
        self._add(_EMBEDDING, (config.vocab_size, hidden), vocabulary)
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}."
            self._add(prefix + "input_layernorm.weight", (hidden,))
            self._add_attention(prefix + "self_attn.", hidden, qkv_bias, attention_bias)
            self._add(prefix + "post_attention_layernorm.weight", (hidden,))
            mlp = prefix + "mlp."
            rows = self._even_shard(0, inner)
            gate_up = [_Part(f"{mlp}{name}.weight", (inner, hidden), rows) for name in ("gate_proj", "up_proj")]
            self._merged[mlp + "gate_up.weight"] = gate_up
            self._add(mlp + "down_proj.weight", (hidden, inner), self._even_shard(1, inner))
        self._add("model.norm.weight", (hidden,))
        if not config.tie_word_embeddings:
            self._add("lm_head.weight", (config.vocab_size, hidden), vocabulary)

    def _add_attention(self, prefix: str, hidden: int, qkv_bias: bool, out_bias: bool) -> None:
        config = self._config
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        parts = {
            "q_proj": (queries, self._even_shard(0, queries)),
            "k_proj": (keys, self._kv_shard()),
            "v_proj": (keys, self._kv_shard()),
        }
        weights = [_Part(f"{prefix}{name}.weight", (size, hidden), shard) for name, (size, shard) in parts.items()]
        self._merged[prefix + "qkv.weight"] = weights
        if qkv_bias:
            self._merged[prefix + "qkv.bias"] = [
                _Part(f"{prefix}{name}.bias", (size,), shard) for name, (size, shard) in parts.items()
            ]
        if config.model_type == "qwen3":
            self._add(prefix + "q_norm.weight", (self.head_dim,))
            self._add(prefix + "k_norm.weight", (self.head_dim,))
        self._add(prefix + "o_proj.weight", (hidden, queries), self._even_shard(1, queries))
        if out_bias:
            self._add(prefix + "o_proj.bias", (hidden,))

    def _add_adapters(self, options: AdapterOptions) -> None:
        """Append the matrices A as rows to the merged weights of linear layers, and as many zeros to the biases.

        The matrices B of each merged weight are a tensor of their own.
        """
        for name, parts in list(self._merged.items()):
            layers = self._adapted_layers(name)
            if not layers:
                continue
            outputs, rows = sum(part.shape[0] for part in parts), options.slots * len(layers) * options.padded_rank
            parts.append(_Part(name, (rows, parts[0].shape[1]), of_adapters=True))
            self._merged.get(name.replace(".weight", ".bias"), []).append(_Part(name, (rows,), of_adapters=True))
            self._merged[_up_name(name)] = [_Part(name, (outputs, rows), of_adapters=True)]

    def _adapted_layers(self, name: str) -> list[AdaptedLayer]:
        """The linear layers of a merged weight that have adapters."""
        options, parts = self._adapters, self._merged[name]
        if options is None or name in (_EMBEDDING, "lm_head.weight") or len(parts[0].full) != 2:
            return []
        layers, start = [], 0
        for part in parts:
            layer, stop = part.name.removesuffix(".weight"), start + part.shape[0]
            if not part.of_adapters and options.selects(layer):
                layers.append(AdaptedLayer(layer, start, stop, part.shard))
            start = stop
        return layers

    def adapter_groups(self, merged: dict[str, torch.Tensor]) -> dict[str, AdapterGroup]:
        """The adapters of each merged weight, in the memory of `split_buffer`; set to zero."""
        groups = {}
        for name, tensor in merged.items():
            if self._adapters is not None and (up := merged.get(_up_name(name))) is not None:
                bias = merged.get(name.replace(".weight", ".bias"))
                layers = self._adapted_layers(name)
                groups[name] = AdapterGroup(
                    layers, tensor[len(up) :], up, self._adapters, None if bias is None else bias[len(up) :]
                )
        return groups

    def _add(self, name: str, shape: tuple[int, ...], shard: WeightShard | None = None) -> None:
        self._merged[name] = [_Part(name, shape, shard)]

    def _even_shard(self, dim: int, size: int) -> WeightShard | None:
        """This rank's shard of a dimension that is divided evenly."""
        rank, ranks = self._parallel.rank, self._parallel.size
        return None if ranks == 1 else WeightShard(dim, rank * (size // ranks), size // ranks, size)

    def _kv_shard(self) -> WeightShard | None:
        """The key/value heads of this rank's queries. With fewer heads than ranks, several ranks hold the same head."""
        rank, ranks, heads = self._parallel.rank, self._parallel.size, self._config.num_key_value_heads
        if ranks == 1:
            return None
        first = rank * heads // ranks
        # A replicated head is counted once, by the first rank that holds it.
        counted = heads >= ranks or rank % (ranks // heads) == 0
        dim = self.head_dim
        return WeightShard(0, first * dim, self.kv_heads * dim, heads * dim, counted)


def _up_name(name: str) -> str:
    """Name of the matrices B of a merged weight."""
    return f"{name}.lora_B"


def _elements(parts: list[_Part]) -> int:
    return sum(math.prod(part.shape) for part in parts)
