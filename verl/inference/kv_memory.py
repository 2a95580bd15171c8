"""KVMemory: the blocks all sequences share, as one region that can be given back while training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.inference.attention.base import KVCache
from verl.inference.memory import Region
from verl.inference.models import InferenceModel
from verl.utils.device_copy import copied_together

__all__ = ["KVMemory", "bytes_per_block", "bytes_per_token"]


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
            (index,) = copied_together([torch.tensor(pairs, dtype=torch.int64)], self._all.device)
            self._all[:, :, index[:, 1]] = self._all[:, :, index[:, 0]]
