"""Batch columns that are the trainer's own: a column of the data with such a name is kept under another one."""

from __future__ import annotations

from collections.abc import Iterable

from verl.types.schema import RESERVED


def names_in_batch(columns: Iterable[str]) -> dict[str, str]:
    """For every column of the data the name that it has in a batch: its own, or with `data_` before a reserved one."""
    columns = list(columns)
    taken, names = {*columns, *RESERVED}, {}
    for column in columns:
        name = column
        if column in RESERVED:
            while name in taken:
                name = f"data_{name}"
            taken.add(name)
        names[column] = name
    return names
