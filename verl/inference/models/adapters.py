"""LoRA adapters (arXiv 2106.09685) in the matmuls of a model: a fixed number of slots, applied without merging.

The product `x A^T` of all slots is one matmul, masked by the slot of each token, and multiplied with the matrices B of
all slots. Tokens without an adapter add exact zeros. Shapes and addresses never change, so CUDA graphs stay valid. The
scale of an adapter is part of its B.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from verl.inference.weights import WeightShard

__all__ = ["AdaptedLayer", "AdapterGroup", "AdapterOptions", "ModelAdapters", "down_name", "up_name"]

# Ranks are padded to a multiple of this: rows of unaligned length make matmuls on GPUs slower.
_RANK_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Size of the adapter slots of a model."""

    rank: int
    """Largest rank of an adapter."""
    slots: int = 1
    layers: frozenset[str] | None = None
    """Names of the linear layers with adapters; None: all but the output head."""
    shared: bool = True
    """Every token uses slot 0; otherwise each sequence selects a slot, or none."""

    @property
    def padded_rank(self) -> int:
        return -(-self.rank // _RANK_MULTIPLE) * _RANK_MULTIPLE

    def selects(self, layer: str) -> bool:
        return self.layers is None or layer in self.layers


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer, whose outputs are columns `start` to `stop` of a matmul's."""

    name: str
    start: int
    stop: int
    shard: WeightShard | None = None
    """Shard of its weight on this rank."""


class AdapterGroup:
    """The adapters of one matmul, which may be that of several layers (query, key and value).

    `down` [slots * layers * rank, inputs]: the matrices A. `up` [outputs, slots * layers * rank]: the matrices B, zero
    where a row is the output of another layer. `bias` [slots * layers * rank]: added to `x A^T`, always zero.
    """

    def __init__(
        self,
        layers: Sequence[AdaptedLayer],
        down: torch.Tensor,
        up: torch.Tensor,
        options: AdapterOptions,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.layers, self.down, self.up, self._bias = tuple(layers), down, up, bias
        self.outputs = len(up)
        self._slots, self._rank = options.slots, options.padded_rank
        self.clear()

    def matrices(self, slot: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of A [padded rank, inputs] and B [outputs of the layer, padded rank]."""
        start, rows = (slot * len(self.layers) + layer) * self._rank, self.layers[layer]
        stop = start + self._rank
        return self.down[start:stop], self.up[rows.start : rows.stop, start:stop]

    def clear(self) -> None:
        """Set all matrices to zero."""
        self.down.zero_()
        self.up.zero_()
        if self._bias is not None:
            self._bias.zero_()

    def add_(self, output: torch.Tensor, inner: torch.Tensor, unused: torch.Tensor | None) -> torch.Tensor:
        """Add the adapters' part to `output` [T, outputs], in place. `inner` [T, slots * layers * rank]: x A^T.

        `unused` [T, slots, 1]: whether a token does not use a slot; None: every token uses slot 0.
        """
        if unused is not None:
            # Not multiplied by 0: an adapter whose products overflow would make the rows of others NaN.
            inner.unflatten(1, (self._slots, -1)).masked_fill_(unused, 0.0)
        return output.addmm_(inner, self.up.t())


class ModelAdapters:
    """All adapter slots of a model."""

    def __init__(self, groups: Iterable[AdapterGroup], options: AdapterOptions) -> None:
        self.options = options
        self._groups = list(groups)
        names = {layer.name for group in self._groups for layer in group.layers}
        missing = sorted((options.layers or frozenset()) - names)
        if missing:
            raise ValueError(f"LoRA: this model has no linear layer {missing[0]!r} below its output head.")
        if not self._groups:
            raise ValueError("LoRA: this model has no linear layers.")
        self.device = self._groups[0].up.device
        self._slots = torch.arange(options.slots, device=self.device)

    def weights(self, slot: int = 0, rank: int | None = None) -> dict[str, torch.Tensor]:
        """The matrices of a slot by name, as views: `<layer>.lora_A.weight` [rank, inputs], `<layer>.lora_B.weight`
        [outputs, rank]. `rank` defaults to the largest one."""
        tensors, rank = {}, self.options.rank if rank is None else rank
        for group in self._groups:
            for index, layer in enumerate(group.layers):
                down, up = group.matrices(slot, index)
                tensors[down_name(layer.name)] = down[:rank]
                tensors[up_name(layer.name)] = up[:, :rank]
        return tensors

    def shards(self) -> dict[str, WeightShard]:
        """Shards of these matrices on this tensor-parallel rank."""
        layers = [layer for group in self._groups for layer in group.layers if layer.shard is not None]
        return {
            (down_name if layer.shard.dim else up_name)(layer.name): layer.shard
            for layer in layers
            if layer.shard is not None
        }

    def clear(self, slot: int | None = None) -> None:
        """Set the matrices of a slot (None: all memory, which may be undefined) to zero."""
        if slot is None:
            for group in self._groups:
                group.clear()
            return
        for group in self._groups:
            for index in range(len(group.layers)):
                for matrix in group.matrices(slot, index):
                    matrix.zero_()

    def unused_by(self, slots: torch.Tensor) -> torch.Tensor:
        """The argument `unused` of `AdapterGroup.add_` for tokens with these slots [T] (-1: none)."""
        return (slots.unsqueeze(1) != self._slots).unsqueeze(2)


def down_name(layer: str) -> str:
    """Name of a layer's matrix A."""
    return f"{layer}.lora_A.weight"


def up_name(layer: str) -> str:
    """Name of a layer's matrix B, which includes the scale of the adapter."""
    return f"{layer}.lora_B.weight"
