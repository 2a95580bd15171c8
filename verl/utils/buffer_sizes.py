"""Sizes in bytes of the buffers that engines allocate, shared by the engines and the memory plan; imports no torch."""

from __future__ import annotations

# Bytes of a chunk of float32 logits. On CUDA large enough that matmuls run at full speed, and that accumulating the
# gradient of the weight (a read and a write of float32 [vocab, H] per chunk) is cheap in comparison. On CPU the same
# holds from 32 MB on, and above 64 MB the passes over the chunk get slower.
CHUNK_BYTES = {"cuda": 2**30, "cpu": 64 * 2**20}
PORTION = 1 << 25
"""Number of elements whose bfloat16 moments are expanded to float32 at a time; a larger tensor is expanded alone."""
# Keys of all rows per computed token up to which attention copies the keys of each row. On an H200 copies are faster
# than a second kernel up to 4 keys and as fast at 6 (benchmarks/prefix_attention.py).
MAX_GATHERED_KEYS = 5.0
# Captured sizes; a step is padded to the next one. Above the last, launch overhead does not matter.
DECODE_SIZES = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 513, 32), *range(576, 1025, 64))
MIXED_SIZES = (64, *range(128, 2049, 128), *range(2304, 3073, 256), 3584, 4096)
# Fraction of available host memory for KV; other programs need memory too.
_HOST_SHARE = 0.25
# Fraction of device memory left for workspaces of kernels and CUDA graphs.
_DEVICE_RESERVE = 0.03
# float32 tensors [sequences, vocabulary] that sampling allocates at most besides the logits.
_LOGIT_COPIES = 3


# ---------------------------------------------------------------- training engines


def chunk_bytes(rows: int, vocab: int, element_size: int, device_type: str) -> int:
    """Return the maximum size of a chunk of logits of `rows` rows; `element_size`: of the inputs of the head."""
    return min(rows * vocab * max(4, element_size), CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]))


def working_bytes(elements: int, largest: int) -> int:
    """Return the temporary memory of a step with bfloat16 moments of `elements` elements; `largest`: of one tensor.

    It consists of both moments of a portion in float32, and a random number for each to round it.
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


def device_kv_bytes(total: int, free: int, utilization: float, weight_bytes: int, logits: int) -> int:
    """Bytes for KV on a GPU of `total` bytes, of which `free` are free after loading the weights."""
    return max(0, min(int(utilization * total) - weight_bytes, free - int(_DEVICE_RESERVE * total)) - logits)


def host_kv_bytes(available: int) -> int:
    """Bytes for KV on a CPU."""
    return int(_HOST_SHARE * available)


def logit_bytes(sequences: int, vocab: int, truncated: bool = True) -> int:
    """Bytes of the logits and of sampling's work tensors, which a GPU needs only for top-k, top-p and min-p."""
    return sequences * vocab * 4 * (1 + (_LOGIT_COPIES if truncated else 0))


def step_bytes(tokens: int, hidden: int, intermediate: int, itemsize: int) -> int:
    """Peak activation bytes of a step: residual, a norm's output, and the three products of the MLP."""
    return tokens * itemsize * (2 * hidden + 3 * intermediate)


def pool_bytes(row_bytes: int, step_bytes: int, max_sequences: int) -> int:
    """Memory of all graphs: for each size the hidden states (`row_bytes` per token), and once the activations of the
    largest step (`step_bytes` per token)."""
    decode = [size for size in DECODE_SIZES if size < 2 * max_sequences]
    return row_bytes * (sum(decode) + sum(MIXED_SIZES)) + step_bytes * MIXED_SIZES[-1]
