"""KVMemory: the blocks all sequences share, as one region that can be given back while training; and how large it is.

The memory plan asks here, too, what the engine takes beside its weights: KV blocks, logits, a step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from verl.config.devices import host_memory_available
from verl.inference.attention.base import KVCache
from verl.inference.memory import Region
from verl.inference.models import InferenceModel
from verl.utils.device import copy_to_device

__all__ = [
    "KVMemory",
    "bytes_per_block",
    "bytes_per_token",
    "choose_num_blocks",
    "device_room",
    "host_room",
    "logit_bytes",
    "step_bytes",
]

logger = logging.getLogger(__name__)

# Of host memory, which programs share without saying what they will need.
_HOST_SHARE = 0.25
# Of device memory, for kernels' workspaces and captured graphs.
_DEVICE_RESERVE = 0.03
# float32 columns of [sequences, vocabulary] that sampling holds at most beside the logits.
_LOGIT_COPIES = 3


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """A key and a value of every head in every layer."""
    return 2 * layers * kv_heads * head_dim * itemsize


def bytes_per_block(model: InferenceModel, block_size: int) -> int:
    """Keys and values of `block_size` tokens in every layer."""
    return block_size * bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, model.dtype.itemsize)


class KVMemory:
    """`num_blocks` blocks, and one more (`spare_block`) where rows that stand for nobody may write."""

    def __init__(self, model: InferenceModel, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.spare_block = num_blocks
        self.region = Region((num_blocks + 1) * bytes_per_block(model, block_size), model.device)
        shape = (model.num_layers, 2, num_blocks + 1, block_size, model.num_kv_heads, model.head_dim)
        self._all = self.region.bytes.view(model.dtype).view(shape)
        self.layers: list[KVCache] = [(layer[0], layer[1]) for layer in self._all]
        self._clear()
        self._experts: torch.Tensor | None = None

    def note_experts(self, model: InferenceModel) -> None:
        """From now on every token's experts are kept beside its KV: who takes over a prefix takes over its experts."""
        table = model.noted_experts((self.num_blocks + 1) * self.block_size)
        self._experts = table.unflatten(0, (-1, self.block_size))

    def experts_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Experts [tokens, layers, k] of the tokens whose KV is at `slots` [tokens], as a copy on the device."""
        assert self._experts is not None, "this KV memory stores no experts"
        return self._experts.flatten(0, 1)[slots]

    @property
    def held_bytes(self) -> int:
        """Memory it takes now."""
        return self.region.size if self.region.held else 0

    def release(self) -> None:
        """Give the memory back."""
        self.region.release()

    def restore(self) -> None:
        """Take it again; nothing that was there is."""
        self.region.restore()
        self._clear()

    def _clear(self) -> None:
        """Whatever was there is not a number that could spread: masked lanes multiply it by zero.

        CPU attention looks at nothing it should not see; there, memory that is not touched is not even taken.
        """
        if self.region.device.type != "cpu":
            self._all.zero_()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Content of (from, to), all at once."""
        if pairs:
            (index,) = copy_to_device([torch.tensor(pairs, dtype=torch.int64)], self._all.device)
            self._all[:, :, index[:, 1]] = self._all[:, :, index[:, 0]]
            if self._experts is not None:
                self._experts[index[:, 1]] = self._experts[index[:, 0]]


def choose_num_blocks(
    model: InferenceModel,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    gpu_memory_utilization: float,
) -> int:
    """Blocks for `max_num_seqs` sequences of `max_model_len` tokens, or as many as fit; said in the log.

    On a GPU, weights and KV may take `gpu_memory_utilization` of its memory, and never more than is free. On a CPU, KV
    may take a quarter of what is available.
    """
    each = bytes_per_block(model, block_size)
    per_sequence = -(-max_model_len // block_size)
    wanted = max_num_seqs * per_sequence
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(model.device)
        logits = logit_bytes(max_num_seqs, model.vocab_size)
        room = device_room(total, free, gpu_memory_utilization, model.region.size, logits)
        remedy = "Raise gpu_memory_utilization, or lower max_model_len"
    else:
        room = host_room(host_memory_available())
        remedy = "Free host memory, or lower max_model_len"
    blocks = min(wanted, room // each)
    if blocks < per_sequence:
        raise ValueError(
            f"max_model_len: the KV of one sequence of {max_model_len} tokens takes"
            f" {_gb(per_sequence * each)}, and there is room for {_gb(room)}. {remedy}."
        )
    logger.info(
        "rollout: %s of KV memory: %d blocks of %d tokens (%s)",
        _gb(blocks * each),
        blocks,
        block_size,
        f"enough for {max_num_seqs} sequences of {max_model_len} tokens"
        if blocks == wanted
        else f"{blocks / wanted:.0%} of what {max_num_seqs} sequences of {max_model_len} tokens can take",
    )
    return blocks


def device_room(total: int, free: int, utilization: float, weight_bytes: int, logits: int) -> int:
    """Bytes for KV on a GPU of `total` bytes, `free` of them once the weights are there."""
    return max(0, min(int(utilization * total) - weight_bytes, free - int(_DEVICE_RESERVE * total)) - logits)


def host_room(available: int) -> int:
    """The same on a CPU."""
    return int(_HOST_SHARE * available)


def logit_bytes(sequences: int, vocab: int, truncated: bool = True) -> int:
    """Logits of so many sequences and what sampling holds beside them; without top-k and the like a GPU needs none."""
    return sequences * vocab * 4 * (1 + (_LOGIT_COPIES if truncated else 0))


def step_bytes(tokens: int, hidden: int, intermediate: int, itemsize: int) -> int:
    """Activations of a step at its fullest: residual, a norm's output, and the MLP's three products."""
    return tokens * itemsize * (2 * hidden + 3 * intermediate)


def _gb(size: int) -> str:
    return f"{size / 2**30:.2f} GB"
