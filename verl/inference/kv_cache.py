"""KVCache: the paged KV cache, and how many blocks fit into the memory of the device or of the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from verl.config.devices import host_memory_available
from verl.inference.attention import LayerKVCache
from verl.inference.memory import Region
from verl.inference.models import InferenceModel
from verl.utils.buffer_sizes import bytes_per_token, device_kv_bytes, host_kv_bytes, logit_bytes
from verl.utils.device import copy_to_device

__all__ = ["KVCache", "bytes_per_block", "choose_num_blocks"]

logger = logging.getLogger(__name__)


def bytes_per_block(model: InferenceModel, block_size: int) -> int:
    """KV bytes of `block_size` tokens in every layer."""
    return block_size * bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, model.dtype.itemsize)


class KVCache:
    """The paged KV cache: `num_blocks` blocks, and one more (`padding_block`) to which padding rows write."""

    def __init__(self, model: InferenceModel, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.padding_block = num_blocks
        self.region = Region((num_blocks + 1) * bytes_per_block(model, block_size), model.device)
        shape = (model.num_layers, 2, num_blocks + 1, block_size, model.num_kv_heads, model.head_dim)
        self._all = self.region.bytes.view(model.dtype).view(shape)
        self.layers: list[LayerKVCache] = [(layer[0], layer[1]) for layer in self._all]
        self._clear()
        self._experts: torch.Tensor | None = None

    def record_experts(self, model: InferenceModel) -> None:
        """From now on, store the experts of every token with its KV, so that a cached prefix includes its experts."""
        table = model.record_experts((self.num_blocks + 1) * self.block_size)
        self._experts = table.unflatten(0, (-1, self.block_size))

    def experts_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Experts [tokens, layers, k] of the tokens whose KV is at `slots` [tokens], as a copy on the device."""
        assert self._experts is not None, "this KV cache stores no experts"
        return self._experts.flatten(0, 1)[slots]

    @property
    def held_bytes(self) -> int:
        """Bytes that are currently allocated."""
        return self.region.size if self.region.held else 0

    def release(self) -> None:
        """Free the memory; all KV is lost."""
        self.region.release()

    def restore(self) -> None:
        """Allocate the memory again; the KV is not restored."""
        self.region.restore()
        self._clear()

    def _clear(self) -> None:
        """Zero the memory on GPUs: kernels multiply masked entries by zero, which would spread NaN.

        CPU attention reads no masked entries; there, untouched memory is not even allocated.
        """
        if self.region.device.type != "cpu":
            self._all.zero_()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), all at once."""
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
    graphs: int = 0,
) -> int:
    """Number of blocks for `max_num_seqs` sequences of `max_model_len` tokens, or as many as fit; logs it.

    On a GPU, weights and KV take at most `gpu_memory_utilization` of its memory, and never more than is free beside
    `graphs` bytes of CUDA graphs. On a CPU, KV takes at most a quarter of the available memory.
    """
    block_bytes = bytes_per_block(model, block_size)
    per_sequence = -(-max_model_len // block_size)
    needed = max_num_seqs * per_sequence
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(model.device)
        logits = logit_bytes(max_num_seqs, model.vocab_size)
        available = device_kv_bytes(total, free, gpu_memory_utilization, model.region.size, logits, graphs)
        remedy = "Raise gpu_memory_utilization, or lower max_model_len"
    else:
        available = host_kv_bytes(host_memory_available())
        remedy = "Free host memory, or lower max_model_len"
    blocks = min(needed, available // block_bytes)
    if blocks < per_sequence:
        raise ValueError(
            f"max_model_len: the KV of one sequence of {max_model_len} tokens takes"
            f" {_gb(per_sequence * block_bytes)}, but only {_gb(available)} are available. {remedy}."
        )
    logger.info(
        "rollout: %s of KV cache: %d blocks of %d tokens (%s)",
        _gb(blocks * block_bytes),
        blocks,
        block_size,
        f"enough for {max_num_seqs} sequences of {max_model_len} tokens"
        if blocks == needed
        else f"{blocks / needed:.0%} of what {max_num_seqs} sequences of {max_model_len} tokens can use",
    )
    return blocks


def _gb(size: int) -> str:
    return f"{size / 2**30:.2f} GB"
