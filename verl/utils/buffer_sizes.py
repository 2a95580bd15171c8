"""Sizes in bytes of the buffers that engines allocate, shared by the engines and the memory plan; imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

# Bytes of a chunk of float32 logits. On CUDA large enough that matmuls run at full speed, and that accumulating the
# gradient of the weight (a read and a write of float32 [vocab, H] per chunk) is cheap in comparison. On CPU the same
# holds from 32 MB on, and above 64 MB the passes over the chunk get slower.
CHUNK_BYTES = {"cuda": 2**30, "cpu": 64 * 2**20}
PORTION = 1 << 25
"""Number of elements whose bfloat16 moments are expanded to float32 at a time; a larger tensor is expanded alone."""
# Attention over shared prefixes copies the keys of each row, if the rows together have at most this many keys per
# computed token; otherwise it uses a second kernel. On an H200 copies are faster up to 4 keys per token and as fast at
# 6 (benchmarks/prefix_attention.py).
MAX_GATHERED_KEYS = 5.0
# Sizes of CUDA graphs; a step is padded to the next one. Above the last, launch overhead does not matter. Each size in
# use costs a capture: finer ones save no time, because matmuls compute rows in tiles of 64 or 128.
DECODE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, *range(160, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
MIXED_SIZES = (64, *range(128, 2049, 128), *range(2304, 3073, 256), 3584, 4096)
# Fraction of available host memory for KV; other programs need memory too.
_HOST_SHARE = 0.25
# Fraction of device memory left for workspaces of kernels.
_DEVICE_RESERVE = 0.03
# float32 tensors [sequences, vocabulary] that sampling allocates at most besides the logits.
_LOGIT_COPIES = 3


# ---------------------------------------------------------------- training engines


def chunk_bytes(rows: int, vocab: int, element_size: int, device_type: str) -> int:
    """Return the maximum size of a chunk of logits of `rows` rows; `element_size`: of the inputs of the head."""
    return min(rows * vocab * max(4, element_size), CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]))


def working_bytes(elements: int, largest: int) -> int:
    """Return the temporary memory of a step with bfloat16 moments of `elements` elements.

    `largest`: elements of the largest tensor. The memory consists of both moments of a portion in float32, and a random
    number for each to round it.
    """
    return 16 * min(elements, max(largest, PORTION))


def grouping(ranks: int, reshard_after_forward: bool | None) -> tuple[bool, bool]:
    """Return (whether layers are resharded after the forward pass, whether all weights form one group).

    They form one group if nothing is gathered and all weights may stay in the compute dtype: there is then no host work
    between layers, which dominates the time of small models.
    """
    reshards = ranks > 1 if reshard_after_forward is None else reshard_after_forward
    return reshards, not (ranks > 1 or reshards)


# ---------------------------------------------------------------- rollout engine


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """KV bytes of a token: a key and a value of every head in every layer."""
    return 2 * layers * kv_heads * head_dim * itemsize


def device_kv_bytes(total: int, free: int, utilization: float, weight_bytes: int, logits: int, graphs: int) -> int:
    """Bytes for KV on a GPU of `total` bytes, of which `free` are free after loading the weights; `graphs`: bytes of
    CUDA graphs (`graph_bytes`)."""
    remaining = free - int(_DEVICE_RESERVE * total) - graphs
    return max(0, min(int(utilization * total) - weight_bytes, remaining) - logits)


def host_kv_bytes(available: int) -> int:
    """Bytes for KV on a CPU."""
    return int(_HOST_SHARE * available)


def logit_bytes(sequences: int, vocab: int, truncated: bool = True) -> int:
    """Bytes of the logits and of sampling's work tensors, which a GPU needs only for top-k, top-p and min-p."""
    return sequences * vocab * 4 * (1 + (_LOGIT_COPIES if truncated else 0))


def step_bytes(tokens: int, hidden: int, intermediate: int, itemsize: int) -> int:
    """Peak activation bytes of a step: residual, a norm's output, and the three products of the MLP."""
    return tokens * itemsize * (2 * hidden + 3 * intermediate)


def inner_size(text: Any) -> int:
    """Width of a token's MLP activations in a language model of this config; with experts, of all that a token uses."""
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        inner = (getattr(text, "moe_intermediate_size", None) or inner) * (text.num_experts_per_tok or 1)
    return int(inner)


def graph_sizes(max_sequences: int, max_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of CUDA graphs that decode steps and steps with prefills can use, ascending.

    A step has at most `max_tokens` tokens, of at most `max_sequences` sequences.
    """
    return _up_to(DECODE_SIZES, min(max_sequences, max_tokens)), _up_to(MIXED_SIZES, max_tokens)


def graph_bytes(hidden: int, intermediate: int, itemsize: int, max_sequences: int, max_tokens: int) -> int:
    """Memory of all CUDA graphs: they share the activations and the hidden states of the largest step."""
    largest = max(size for sizes in graph_sizes(max_sequences, max_tokens) for size in sizes)
    return largest * itemsize * hidden + step_bytes(largest, hidden, intermediate, itemsize)


def _up_to(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The sizes to which counts up to `count` are padded."""
    return sizes[: bisect_left(sizes, count) + 1]
