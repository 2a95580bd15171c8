"""A weight for every place in a tensor: an odd 64-bit number that the index decides, the same on every machine.

Index i has the weight high[i // BLOCK] × low[i % BLOCK] mod 2^64; both tables are splitmix64 (the finaliser of Steele
et al., "Fast splittable pseudorandom number generators", 2014) of their place, made odd. Two short tables serve a
tensor of any size, and a sum over a block needs one of the factors only once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl.utils.counter_noise import GOLDEN_64, mix_64

__all__ = ["BLOCK", "Place", "high_weights", "low_weights"]

BLOCK = 4096
_LOW, _HIGH = 0, -(1 << 63)  # where each table begins in the sequence of the hash
_grown: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part lies in the whole tensor: runs of `run` consecutive elements (None: one of all), the first at index
    `start`, each `stride` after the one before."""

    start: int = 0
    run: int | None = None
    stride: int = 0

    @classmethod
    def of_part(cls, shape: Sequence[int], dim: int, start: int, full: int) -> Place:
        """Of a part of this shape, which has the entries from `start` on of the `full` ones of dimension `dim`."""
        inner = math.prod(shape[dim + 1 :])
        if math.prod(shape[:dim]) == 1:
            return cls(start * inner)
        return cls(start * inner, shape[dim] * inner, full * inner)


@functools.cache
def low_weights(device: torch.device) -> torch.Tensor:
    """int64 [BLOCK]."""
    return _table(_LOW, BLOCK).to(device)


def high_weights(blocks: int, device: torch.device) -> torch.Tensor:
    """int64 [at least `blocks`]; kept on the device."""
    table = _grown.get(device)
    if table is None or len(table) < blocks:
        table = _grown[device] = _table(_HIGH, max(1024, 2 * blocks)).to(device)
    return table


def _table(first: int, size: int) -> torch.Tensor:
    return mix_64((torch.arange(1, size + 1) + first) * GOLDEN_64) | 1
