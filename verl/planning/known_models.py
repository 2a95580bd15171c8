"""Shapes of the Qwen2.5 models by formula: the sizes that are tried for the largest model that fits.

They also stand for a hub model of that name whose config.json is not on this machine.
"""

from __future__ import annotations

import re

from verl.planning.shapes import CoreShape, ModelShape

# hidden, layers, attention heads, key heads, MLP width, vocabulary, tied embeddings.
_QWEN = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, False),
    "Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
    "Qwen2.5-72B": (8192, 80, 64, 8, 29568, 152064, False),
}
_POSITIONS = 32768
KNOWN_MODELS = tuple(_QWEN)
"""Names, smallest first."""
_VARIANT = re.compile(r"(?:Qwen/)?(Qwen2\.5(?:-Math|-Coder)?)(-[\d.]+B)(-Instruct|-Base)?", re.IGNORECASE)


def known_name(path: str) -> str | None:
    """Return the known model with the shape of a hub name, e.g. Qwen2.5-7B for Qwen/Qwen2.5-7B-Instruct; else None."""
    match = _VARIANT.fullmatch(path)
    name = f"Qwen2.5{match[2].upper()}" if match else ""
    return name if name in _QWEN else None


def known_shape(name: str, kind: str = "causal_lm", lora_rank: int = 0) -> ModelShape:
    """Return the shape of a known model. `kind` as in `models.loading`; `lora_rank`: adapters of all linear layers."""
    hidden, layers, heads, kv_heads, inner, vocab, tied = _QWEN[name]
    head_dim = hidden // heads
    query, key = heads * head_dim, kv_heads * head_dim
    attention = (2 * query + 2 * key) * hidden + query + 2 * key  # queries, keys and values have biases
    layer = attention + 3 * hidden * inner + 2 * hidden
    embeddings = vocab * hidden
    head = {"causal_lm": 0 if tied else embeddings, "value": hidden + 1, "sequence_classification": hidden}[kind]
    projections = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    projections += [(hidden, inner), (hidden, inner), (inner, hidden)]
    adapters = lora_rank * layers * sum(map(sum, projections)) + (0 if kind == "causal_lm" else head)
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=inner,
        vocab=vocab,
        tied=tied,
        layer_parameters=layers * layer,
        root_parameters=embeddings + hidden + head,
        largest_parameters=embeddings,
        adapter_parameters=adapters if lora_rank else None,
        core=CoreShape(layers, hidden, heads, query, key, inner, vocab, tied, attention, 2 * hidden),
        positions=_POSITIONS,
    )
