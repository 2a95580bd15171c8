"""Conversion of recorded columns to values that can be encoded as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["column_lists", "flatten", "merge_responses", "numbers"]


def numbers(values: pa.Array | pa.ChunkedArray) -> list[float | int | None]:
    """Numbers of a column; null, NaN and infinite values are None. 32-bit values have their shortest decimal form."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_integer(values.type):
        return values.to_pylist()
    array = values.to_numpy(zero_copy_only=False)
    finite = np.isfinite(array)
    if array.dtype == np.float32:
        array = array.astype("U16").astype(np.float64)
    if finite.all():
        return array.tolist()
    return [value if valid else None for value, valid in zip(array.tolist(), finite.tolist(), strict=True)]


def column_lists(table: pa.Table) -> dict[str, list[Any]]:
    """The columns of a table as lists; NaN becomes None."""
    is_float = {field.name: pa.types.is_floating(field.type) for field in table.schema}
    return {
        name: numbers(table[name]) if is_float[name] else [_finite(value) for value in table[name].to_pylist()]
        for name in table.column_names
    }


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as full key → value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def merge_responses(
    rows: Sequence[Mapping[str, Any]], lengths: Sequence[int], trained: Sequence[int]
) -> list[dict[str, Any]]:
    """Merge the rows of each response (agents may have several): turns in order, numbers of tokens added.

    `lengths`, `trained`: tokens of each row, and how many of them are trained on.
    """
    responses: dict[int, dict[str, Any]] = {}
    for row, length, count in zip(rows, lengths, trained, strict=True):
        turns = row["turns"] or []
        response = responses.get(row["sample_index"])
        if response is None:
            skipped = ("prompt", "part", "turns", "rewards")
            response = {name: value for name, value in row.items() if name not in skipped}
            response |= {"turns": [], "parts": 0, "length": 0, "trained": 0, "rewards": dict(row["rewards"] or ())}
            responses[row["sample_index"]] = response
        response["turns"] += [{**turn, "part": row["part"]} for turn in turns]
        response["parts"] += 1
        response["length"] += length
        response["trained"] += count
        response["finish_reason"] = row["finish_reason"]
    return list(responses.values())
