"""A run of elements of a matrix, as optimizers that shard flat buffers hold it, in rectangles of that matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """Rows and columns of a matrix."""

    rows: range
    columns: range


def rectangles(width: int, start: int, stop: int) -> Iterator[Rectangle]:
    """Elements `start` to `stop` of a matrix with rows of `width`: the end of a row, whole rows, the start of one."""
    while start < stop:
        row, column = divmod(start, width)
        whole = (stop - start) // width if column == 0 else 0
        if whole:
            yield Rectangle(range(row, row + whole), range(width))
            start += whole * width
        else:
            end = min(stop, (row + 1) * width)
            yield Rectangle(range(row, row + 1), range(column, column + end - start))
            start = end
