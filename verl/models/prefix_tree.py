"""Prefix trees: rows that begin with the same tokens, so that a model computes the common tokens once.

Rows are ordered depth first (lexicographically): every row shares its longest possible prefix with the row before it,
and contributes only its remaining tokens. Contributed tokens, concatenated in this order, are the *computed* tokens.
The tokens of a row are its *path*; a token attends to the tokens before it on its path.

Everything here is numpy on the host; loops run over rows, not over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np


def prefix_order(rows: Sequence[bytes], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows in depth-first order [b], and for each of them the tokens shared with the row before it [b].

    `rows`: the tokens of each row as `width` bytes per token; tokens are equal if their bytes are. Equal rows keep
    their order.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    arrays = [np.frombuffer(rows[row], dtype=np.uint8) for row in order]
    shared = [0, *(_common(arrays[i - 1], arrays[i]) // width for i in range(1, len(order)))]
    return np.array(order, dtype=np.int64), np.array(shared[: len(order)], dtype=np.int64)


def token_bytes(ids: np.ndarray, experts: np.ndarray | None = None) -> np.ndarray:
    """Return [..., bytes per token] uint8 for `prefix_order`: ids [...] and, if given, replayed experts [..., m]."""
    parts = [np.ascontiguousarray(ids).astype(">u4")[..., None].view(np.uint8)]
    if experts is not None:
        parts.append(np.ascontiguousarray(experts).view(np.uint8).reshape(*ids.shape, -1))
    return np.concatenate(parts, axis=-1)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of leading entries that are equal."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


class PrefixTree:
    """The prefix tree of rows that are given in depth-first order."""

    def __init__(self, lengths: np.ndarray, shared: np.ndarray) -> None:
        """`lengths` [b]: tokens of each row, at least 1. `shared` [b]: tokens it shares with the row before it."""
        self.lengths = lengths
        self.shared = shared

    @property
    def new(self) -> np.ndarray:
        """[b]: tokens that each row contributes."""
        return self.lengths - self.shared

    @property
    def total(self) -> int:
        """Number of computed tokens."""
        return int(self.new.sum())

    @cached_property
    def starts(self) -> np.ndarray:
        """[b + 1]: first computed token that each row contributes; then their number."""
        return np.concatenate([[0], self.new.cumsum()])

    @cached_property
    def paths(self) -> list[np.ndarray]:
        """For each row the computed tokens of its path [length]."""
        paths: list[np.ndarray] = []
        for row, shared in enumerate(self.shared.tolist()):
            own = np.arange(self.starts[row], self.starts[row + 1])
            paths.append(np.concatenate([paths[-1][:shared], own]) if shared else own)
        return paths

    def padded(self, extra: int) -> PrefixTree:
        """Return the tree with one more row of `extra` tokens that shares none."""
        return PrefixTree(np.append(self.lengths, extra), np.append(self.shared, 0))
