"""Where each weight of a Llama-shaped model lies in one buffer, and which HF names are views into merged ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from verl.inference.tensor_parallel import SINGLE, TensorParallel
from verl.inference.weights import Shard, padded

__all__ = ["Layout"]

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class _Part:
    """A weight under its HF name, and what of it is here."""

    name: str
    full: tuple[int, ...]
    shard: Shard | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.shard is None:
            return self.full
        return (*self.full[: self.shard.dim], self.shard.length, *self.full[self.shard.dim + 1 :])


class Layout:
    """Merged tensors in order, and the HF names they consist of, as far as they are on this tensor-parallel rank."""

    def __init__(self, config: Any, parallel: TensorParallel = SINGLE) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._config, self._parallel = config, parallel
        self._merged: dict[str, list[_Part]] = {}
        size = parallel.size
        for what, count in {"attention heads": heads, "intermediate size": config.intermediate_size}.items():
            if count % size:
                raise ValueError(f"tensor_model_parallel_size: {size} does not divide the model's {what} ({count}).")
        if max(kv_heads, size) % min(kv_heads, size):
            raise ValueError(
                f"tensor_model_parallel_size: {size} and the model's {kv_heads} key/value heads: one must divide the"
                " other."
            )
        self.heads, self.kv_heads = heads // size, max(1, kv_heads // size)
        # A vocabulary that cannot be cut evenly is kept whole by every rank.
        self.vocab_is_cut = size > 1 and config.vocab_size % size == 0
        self._fill()

    def shards(self) -> dict[str, Shard]:
        """What of each HF tensor is here, for those that are not whole."""
        found = {part.name: part.shard for parts in self._merged.values() for part in parts if part.shard is not None}
        if self._config.tie_word_embeddings and _EMBEDDING in found:
            found["lm_head.weight"] = found[_EMBEDDING]
        return found

    def mismatch(self) -> str | None:
        """How the family's own module differs from this layout in names or shapes; None if it does not."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(self._config)
        theirs = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        ours = {part.name: part.full for parts in self._merged.values() for part in parts}
        strange = sorted(theirs.items() ^ ours.items())
        return f"parameter {strange[0][0]!r} is not as expected" if strange else None

    def bytes(self, dtype: torch.dtype) -> int:
        """Size of the buffer."""
        return sum(padded(_elements(parts) * dtype.itemsize) for parts in self._merged.values())

    def carve(
        self, buffer: torch.Tensor, dtype: torch.dtype, turned_below: int = 0
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(every HF name, every merged name) as views into `buffer` (uint8).

        Matrices of fewer than `turned_below` elements lie there column by column (but not embeddings, which are looked
        up by row).
        """
        named: dict[str, torch.Tensor] = {}
        merged: dict[str, torch.Tensor] = {}
        start = 0
        for name, parts in self._merged.items():
            size = _elements(parts) * dtype.itemsize
            columns = parts[0].shape[1:]
            flat = buffer[start : start + size].view(dtype)
            if columns and flat.numel() < turned_below and name != _EMBEDDING:
                merged[name] = flat.view(*columns, -1).t()
            else:
                merged[name] = flat.view(-1, *columns)
            start += padded(size)
            row = 0
            for part in parts:
                named[part.name] = merged[name][row : row + part.shape[0]]
                row += part.shape[0]
        if self._config.tie_word_embeddings:
            named["lm_head.weight"] = named[_EMBEDDING]
        return named, merged

    def _fill(self) -> None:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        # Qwen2 has biases on query, key and value without saying so; where attention_bias is set, `o_proj` has one too.
        stated = bool(getattr(config, "attention_bias", False))
        qkv_bias = stated or config.model_type == "qwen2"
        vocabulary = self._cut(0, config.vocab_size) if self.vocab_is_cut else None
        self._add(_EMBEDDING, (config.vocab_size, hidden), vocabulary)
        for index in range(config.num_hidden_layers):
            at = f"model.layers.{index}."
            self._add(at + "input_layernorm.weight", (hidden,))
            self._fill_attention(at + "self_attn.", hidden, qkv_bias, stated)
            self._add(at + "post_attention_layernorm.weight", (hidden,))
            mlp = at + "mlp."
            rows = self._cut(0, inner)
            gate_up = [_Part(f"{mlp}{name}.weight", (inner, hidden), rows) for name in ("gate_proj", "up_proj")]
            self._merged[mlp + "gate_up.weight"] = gate_up
            self._add(mlp + "down_proj.weight", (hidden, inner), self._cut(1, inner))
        self._add("model.norm.weight", (hidden,))
        if not config.tie_word_embeddings:
            self._add("lm_head.weight", (config.vocab_size, hidden), vocabulary)

    def _fill_attention(self, at: str, hidden: int, qkv_bias: bool, out_bias: bool) -> None:
        config = self._config
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        parts = {
            "q_proj": (queries, self._cut(0, queries)),
            "k_proj": (keys, self._cut_keys()),
            "v_proj": (keys, self._cut_keys()),
        }
        weights = [_Part(f"{at}{name}.weight", (size, hidden), shard) for name, (size, shard) in parts.items()]
        self._merged[at + "qkv.weight"] = weights
        if qkv_bias:
            self._merged[at + "qkv.bias"] = [
                _Part(f"{at}{name}.bias", (size,), shard) for name, (size, shard) in parts.items()
            ]
        if config.model_type == "qwen3":
            self._add(at + "q_norm.weight", (self.head_dim,))
            self._add(at + "k_norm.weight", (self.head_dim,))
        self._add(at + "o_proj.weight", (hidden, queries), self._cut(1, queries))
        if out_bias:
            self._add(at + "o_proj.bias", (hidden,))

    def _add(self, name: str, shape: tuple[int, ...], shard: Shard | None = None) -> None:
        self._merged[name] = [_Part(name, shape, shard)]

    def _cut(self, dim: int, size: int) -> Shard | None:
        """This rank's equal part of a dimension."""
        rank, ranks = self._parallel.rank, self._parallel.size
        return None if ranks == 1 else Shard(dim, rank * (size // ranks), size // ranks, size)

    def _cut_keys(self) -> Shard | None:
        """The key/value heads of this rank's queries. With fewer heads than ranks several hold the same one."""
        rank, ranks, heads = self._parallel.rank, self._parallel.size, self._config.num_key_value_heads
        if ranks == 1:
            return None
        first = rank * heads // ranks
        # Counted once: by the first of the ranks that hold it.
        counted = heads >= ranks or rank % (ranks // heads) == 0
        dim = self.head_dim
        return Shard(0, first * dim, self.kv_heads * dim, heads * dim, counted)


def _elements(parts: list[_Part]) -> int:
    return sum(math.prod(part.shape) for part in parts)
