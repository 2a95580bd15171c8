"""The shape of a model, as far as its memory goes: from config.json, and parameter counts from the weight files."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_LAYER = re.compile(r"\.\d+\.")
_HEADS = ("lm_head.", "score.", "classifier.", "embed_out.")
# Older models say the same under other names.
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff"),
}


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
    embedding_parameters: int
    """Embeddings, final norm and what else stands outside the layers, without the output head."""
    gated: bool = True
    """Whether the MLP multiplies two projections."""
    norms_per_layer: int = 2
    norm_in_float32: bool = False
    """Whether a norm's weight is applied before the cast back to half precision (Gemma)."""
    head_norms: bool = False
    """Whether queries and keys have norms of their own (Qwen3)."""

    @property
    def head_parameters(self) -> int:
        """Of an output head of its own."""
        return 0 if self.tied else self.vocab * self.hidden

    def parameters(self, kind: str) -> int:
        """Of a `causal_lm`, a `value` model or a `sequence_classification` one."""
        return self.layer_parameters + self.root_parameters(kind)

    def root_parameters(self, kind: str) -> int:
        """Those outside the layers, which are gathered for the whole of a pass."""
        head = self.head_parameters if kind == "causal_lm" else self.hidden + 1
        return self.embedding_parameters + head

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @classmethod
    def of_folder(cls, folder: str | Path, changes: Mapping[str, Any] | None = None) -> ModelShape | None:
        """Of the model in a local folder, with `changes` to its config; None where its shape is not told."""
        file = Path(folder).expanduser() / "config.json"
        if not file.is_file():
            return None
        config = json.loads(file.read_text(encoding="utf-8"))
        shape = cls.of_config({**config, **(changes or {})})
        return shape if shape is None or changes else shape._counted(Path(folder).expanduser())

    @classmethod
    def of_config(cls, told: Mapping[str, Any]) -> ModelShape | None:
        """From what a config.json holds; None where the usual names are missing."""
        text = told.get("text_config") or told
        found = {name: _first(text, name, *others) for name, others in _OTHER_NAMES.items()}
        vocab = text.get("vocab_size")
        hidden, layers, heads = (found[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        if not (hidden and layers and heads and vocab):
            return None
        family = str(text.get("model_type", ""))
        gated = family not in ("gpt2", "gpt_neox", "opt", "bert", "roberta", "deberta", "deberta-v2", "phi")
        inner = found["intermediate_size"] or 4 * hidden
        head_dim = text.get("head_dim") or hidden // heads
        kv_heads = text.get("num_key_value_heads") or heads
        tied = bool(text.get("tie_word_embeddings", told.get("tie_word_embeddings", True)))
        experts = text.get("num_experts") or text.get("num_local_experts") or 0
        wide = text.get("moe_intermediate_size") or inner if experts else inner
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        mlp = (3 if gated else 2) * hidden * wide * max(1, experts)
        norms = 4 if family in ("gemma2", "gemma3", "gemma3_text") else 2
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=wide * (text.get("num_experts_per_tok") or 1) if experts else inner,
            vocab=vocab,
            tied=tied,
            layer_parameters=layers * (attention + mlp + norms * hidden + hidden * experts),
            embedding_parameters=vocab * hidden + hidden,
            gated=gated,
            norms_per_layer=norms,
            norm_in_float32=family.startswith("gemma"),
            head_norms=family in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text"),
        )

    def _counted(self, folder: Path) -> ModelShape:
        """With the parameters that the folder's safetensors files really hold, where there are such files."""
        sizes = {name: size for file in sorted(folder.glob("*.safetensors")) for name, size in _tensor_sizes(file)}
        in_layers = sum(size for name, size in sizes.items() if _LAYER.search(name))
        outside = sum(size for name, size in sizes.items() if not _LAYER.search(name) and not name.startswith(_HEADS))
        if not in_layers or not outside:
            return self
        return replace(self, layer_parameters=in_layers, embedding_parameters=outside)


def _tensor_sizes(file: Path) -> list[tuple[str, int]]:
    """(name, elements) of every tensor: the header of a safetensors file is a length and that many bytes of JSON."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return [(name, math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]


def _first(told: Mapping[str, Any], *names: str) -> int | None:
    return next((told[name] for name in names if isinstance(told.get(name), int)), None)
