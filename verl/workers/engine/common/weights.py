"""Weights on their way out of an engine, in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

_Piece = TypeVar("_Piece")


def bucketed(pieces: Iterable[tuple[_Piece, int]], max_bytes: int) -> Iterator[list[_Piece]]:
    """The pieces, given with their sizes, as many at a time as fit `max_bytes`; a larger one comes alone."""
    if max_bytes < 1:
        raise ValueError(f"max_bytes: {max_bytes} holds no tensor. Use the size of a transfer buffer, e.g. 512 MB.")
    bucket: list[_Piece] = []
    filled = 0
    for piece, size in pieces:
        if bucket and filled + size > max_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(piece)
        filled += size
    if bucket:
        yield bucket
