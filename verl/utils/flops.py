"""SequenceCost: what one sequence costs a transformer, from its shape: linear in tokens plus quadratic in attention."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class SequenceCost:
    """Floating-point operations of a forward pass; a backward pass takes twice as many, so ratios stay."""

    token: float
    """Of the layers, per token."""
    head: float
    """Of the output layer, per token whose log-prob is wanted."""
    pair: float
    """Of attention, per pair of tokens; a causal model looks at half of them."""

    @classmethod
    def of_shape(cls, given: Mapping[str, Any]) -> SequenceCost:
        """From a Hugging Face `config.json`; where the shape is not told by the usual names, tokens are counted."""
        shape = given.get("text_config") or given
        if any(not isinstance(shape.get(name), int) for name in _SHAPE):
            return TOKENS
        hidden, layers, heads, inner, vocab = (shape[name] for name in _SHAPE)
        head_dim = shape.get("head_dim") or hidden // heads
        kv_heads = shape.get("num_key_value_heads") or heads
        experts = shape.get("num_experts_per_tok") or 0
        if experts:
            inner = experts * (shape.get("moe_intermediate_size") or inner)
        weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
        return cls(token=2.0 * layers * weights, head=2.0 * hidden * vocab, pair=2.0 * layers * heads * head_dim)

    @classmethod
    def of_folder(cls, folder: str | Path, changes: Mapping[str, Any] | None = None) -> SequenceCost:
        """Of the model in a local folder, with `changes` to its configuration; any other path: tokens are counted."""
        file = Path(folder) / "config.json"
        return cls.of_shape({**json.loads(file.read_text()), **(changes or {})}) if file.is_file() else TOKENS

    def __call__(self, tokens: Any, answers: Any = 0) -> np.ndarray:
        """Of sequences [n] of so many tokens, of which so many are answers: float64 [n]."""
        tokens, answers = np.asarray(tokens, dtype=np.float64), np.asarray(answers, dtype=np.float64)
        return tokens * self.token + answers * self.head + tokens**2 * self.pair


# Every token costs the same: for models whose shape is not known.
TOKENS = SequenceCost(token=1.0, head=0.0, pair=0.0)
