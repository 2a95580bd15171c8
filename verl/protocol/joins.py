"""Union (columns and metadata of two batches, equal where both have them) and concatenation (rows of batches)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.types.schema import COLUMNS, SEQUENCE
from verl.utils.nested import deep_equal, describe_difference
from verl.utils.py_functional import append_to_dict

_NUMBERS = set("biufc")  # numpy kinds that promote to each other without loss of meaning


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """A new dict of both dicts' entries; a key in both must hold equal tensors. The inputs are not changed."""
    if tensor_dict1 is None or tensor_dict2 is None:
        only = tensor_dict2 if tensor_dict1 is None else tensor_dict1
        return None if only is None else only.copy()
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise ValueError(f"union: batch sizes {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}.")
    return _add_columns(tensor_dict1.copy(), tensor_dict2)


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A new dict of both dicts' entries; a key in both must hold equal arrays. The inputs are not changed."""
    return _add_columns(dict(tensor_dict1), tensor_dict2)


def _add_columns(merged: Any, other: Any) -> Any:
    for key, column in other.items():
        if key not in merged.keys():
            merged[key] = column
        elif not deep_equal(merged[key], column):
            raise ValueError(f"union: {key!r} differs: {describe_difference(merged[key], column)}.")
    return merged


def continued_columns(prompts: Mapping[str, torch.Tensor], generated: Mapping[str, torch.Tensor]) -> list[str]:
    """Sequence columns of a batch of prompts [B, P] that a generated batch continues with its responses [B, P+R].

    A union takes them from the generated batch. Raises ValueError if the prompts differ; their padding may differ.
    """
    both = [key for key in prompts.keys() if key in generated.keys()]
    names = [key for key in both if key in COLUMNS and COLUMNS[key].axis == SEQUENCE]
    is_generated = {"prompts", "responses", "attention_mask"} <= set(generated.keys())
    if not names or "responses" in prompts.keys() or not is_generated:
        return []
    width = generated["prompts"].shape[1]
    mask = generated["attention_mask"][:, :width]
    for key in names:
        mine, theirs, valid = _left_padded(prompts[key], generated[key][:, :width], mask)
        if key != "attention_mask":  # values of padding are not compared; the masks must be equal
            mine, theirs = mine * valid, theirs * valid
        if not torch.equal(mine, theirs):
            raise ValueError(
                f"union: {key!r} of the generated batch does not begin with the prompts of the other batch. Join a"
                " generated batch only with its own prompts, in the same order."
            )
    return names


def _left_padded(*columns: torch.Tensor) -> list[torch.Tensor]:
    """The columns [B, width], left-padded with zeros to the largest width."""
    width = max(column.shape[1] for column in columns)
    return [torch.nn.functional.pad(column, (width - column.shape[1], 0)) for column in columns]


def union_meta(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A new dict of both dicts' metadata; a key in both must hold equal values."""
    for key, value in other.items():
        if key in mine and not deep_equal(mine[key], value):
            raise ValueError(
                f"DataProto: meta_info[{key!r}] has different values in the two batches: {mine[key]!r} and {value!r}."
                " Pop it from one of them first."
            )
    return {**mine, **other, **mine}


def concat_meta(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metadata of concatenated batches. `metrics` (a dict or a list of dicts) becomes a dict of lists.

    Only metrics may differ between parts; any other key must have equal values.
    """
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        merged = union_meta(merged, {key: value for key, value in part.items() if key != "metrics"})
        part_metrics = part.get("metrics") or {}
        for entry in part_metrics if isinstance(part_metrics, list) else [part_metrics]:
            append_to_dict(metrics, entry)
    return merged | ({"metrics": metrics} if any("metrics" in part for part in parts) else {})


def concat_columns(parts: Sequence[Mapping[str, Any]], caller: str, kind: str) -> dict[str, Any]:
    """Concatenate the columns of the parts, which must have the same columns with rows of the same dtype and shape."""
    first = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        if difference := first.keys() ^ part.keys():
            raise ValueError(f"{caller}: parts 0 and {number} differ in {kind} columns {sorted(difference)}.")
        for key, column in first.items():
            if not _rows_match(column, part[key]):
                cause = describe_difference(column, part[key])
                raise ValueError(f"{caller}: {key!r} differs in parts 0 and {number}: {cause}.")
    joined = {}
    for key, column in first.items():
        pieces = [part[key] for part in parts]
        joined[key] = torch.cat(pieces) if isinstance(column, torch.Tensor) else np.concatenate(pieces)
    return joined


def _rows_match(a: Any, b: Any) -> bool:
    if a.shape[1:] != b.shape[1:]:
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device
    # numpy would silently convert numbers to strings; object arrays accept anything.
    kinds = {a.dtype.kind, b.dtype.kind} - {"O"}
    return len(kinds) < 2 or kinds <= _NUMBERS
