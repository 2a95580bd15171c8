"""Columns that describe the same rows: equality all the way down, joins that must agree, checked keys and rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.utils.py_functional import append_to_dict
from verl.utils.tensor_wire import tensor_to_wire

_NUMBERS = "biufc"  # numpy kinds that promote to each other without changing what they mean


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """A new dict of both dicts' entries; a key in both must hold equal tensors. The inputs are not changed."""
    if tensor_dict1 is None or tensor_dict2 is None:
        only = tensor_dict2 if tensor_dict1 is None else tensor_dict1
        return None if only is None else only.copy()
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise ValueError(f"union: batch sizes {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}.")
    merged = tensor_dict1.copy()
    for key, value in tensor_dict2.items():
        if key not in merged.keys():
            merged[key] = value
        elif not same(merged[key], value):
            raise ValueError(f"union: {key!r} differs in the two: {describe_difference(merged[key], value)}.")
    return merged


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A new dict of both dicts' entries; a key in both must hold equal arrays. The inputs are not changed."""
    merged = dict(tensor_dict1)
    for key, array in tensor_dict2.items():
        if key in merged and not same(merged[key], array):
            raise ValueError(f"union: {key!r} differs in the two: {describe_difference(merged[key], array)}.")
        merged.setdefault(key, array)
    return merged


def union_meta(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A new dict of both dicts' metadata; a key in both must hold equal values."""
    merged = dict(mine)
    for key, value in other.items():
        if key in merged and not same(merged[key], value):
            raise ValueError(
                f"DataProto: meta_info[{key!r}] is in both with different values: {merged[key]!r} and {value!r}."
                " Pop it from one of them first."
            )
        merged.setdefault(key, value)
    return merged


def concat_meta(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metadata of joined batches. `metrics`, a dict or a list of dicts in some, is gathered: a dict of lists.

    Metrics are what legitimately differs between parts; any other key that several have must agree.
    """
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        merged = union_meta(merged, {key: value for key, value in part.items() if key != "metrics"})
        given = part.get("metrics") or {}
        for one in given if isinstance(given, list) else [given]:
            append_to_dict(metrics, one)
    return merged | ({"metrics": metrics} if any("metrics" in part for part in parts) else {})


def concat_columns(parts: Sequence[Mapping[str, Any]], caller: str, kind: str) -> dict[str, Any]:
    """Every column joined over the parts, which must have the same columns with rows of the same type and shape."""
    first = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        difference = first.keys() ^ part.keys()
        if difference:
            raise ValueError(f"{caller}: parts 0 and {number} differ in {kind} columns {sorted(difference)}.")
        for key, column in first.items():
            if not _rows_match(column, part[key]):
                cause = describe_difference(column, part[key])
                raise ValueError(f"{caller}: {key!r} differs in parts 0 and {number}: {cause}.")
    return {
        key: torch.cat([part[key] for part in parts])
        if isinstance(column, torch.Tensor)
        else np.concatenate([part[key] for part in parts])
        for key, column in first.items()
    }


def object_array(values: Sequence[Any]) -> np.ndarray:
    """A one-dimensional object array whose entries are exactly these values (numpy would nest equal-length lists)."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal all the way down; NaN equals NaN, and dtypes and shapes count."""
    if a is b:
        return True
    if type(a) is not type(b):
        return bool(np.isscalar(a) and np.isscalar(b) and a == b)
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        b = b.to(a.device)
        return _same_bits(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype != object:
            return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
        return all(same(x, y) for x, y in zip(a.reshape(-1), b.reshape(-1), strict=True))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or bool(a != a and b != b)


def describe_difference(a: Any, b: Any) -> str:
    """Where two columns differ: their types and shapes, or the first row that is not the same."""
    mine, theirs = _describe(a), _describe(b)
    if mine != theirs:
        return f"{mine} and {theirs}"
    return f"first in row {next((i for i in range(len(a)) if not same(a[i], b[i])), None)}"


def describe_columns(tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """One line per column: name, type, shape."""
    lines = []
    for key, value in tensors.items():
        lines.append(f"{key}: {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}")
    for key, array in arrays.items():
        inside = type(array.flat[0]).__name__ if array.dtype == object and array.size else array.dtype
        lines.append(f"{key}: array of {inside} {array.shape}")
    return lines


def check_columns(tensors: TensorDict | None, arrays: Mapping[str, Any]) -> None:
    """Raise ValueError unless every column is of its kind and all have the same number of rows."""
    first = None
    if tensors is not None:
        if len(tensors.batch_size) == 0:
            raise ValueError("DataProto: batch has no batch dimension. Give the TensorDict a batch_size.")
        if len(tensors.batch_size) > 1 and arrays:
            raise ValueError(
                f"DataProto: a batch of size {tuple(tensors.batch_size)} beside object arrays {sorted(arrays)}, which"
                " have one row dimension. Unfold it first."
            )
        first = ("batch", tensors.batch_size[0])
        for key, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"DataProto: batch[{key!r}] is a {type(value).__name__}, not a tensor. Objects belong in"
                    " non_tensor_batch (DataProto.from_tensordict puts them there)."
                )
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise ValueError(
                f"DataProto: non_tensor_batch[{key!r}] is a {type(array).__name__}; it must be a numpy array with one"
                " entry per row (verl.protocol.object_array makes one from a list)."
            )
        first = first or (f"non_tensor_batch[{key!r}]", len(array))
        if len(array) != first[1]:
            raise ValueError(f"DataProto: non_tensor_batch[{key!r}] has {len(array)} rows, {first[0]} has {first[1]}.")


def common_batch_size(tensors: Mapping[str, torch.Tensor], dims: int) -> tuple[int, ...]:
    """The first `dims` dimensions, which all tensors must share."""
    first_key, first = next(iter(tensors.items()))
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"DataProto: {key!r} is a {type(value).__name__}, not a tensor.")
        if value.ndim < dims:
            raise ValueError(f"DataProto: {key!r} has shape {tuple(value.shape)}; it needs {dims} batch dimension(s).")
        if value.shape[:dims] != first.shape[:dims]:
            mine, theirs = tuple(value.shape[:dims]), tuple(first.shape[:dims])
            raise ValueError(f"DataProto: {key!r} has batch size {mine}, {first_key!r} has {theirs}.")
    return tuple(first.shape[:dims])


def as_list(keys: str | Sequence[str] | None) -> list[str]:
    """No key, one key or several, as a list."""
    if keys is None:
        return []
    return [keys] if isinstance(keys, str) else list(keys)


def known_keys(keys: str | Sequence[str] | None, existing: Collection[str], where: str) -> list[str]:
    """The keys as a list without repetitions; a KeyError names those that do not exist."""
    names = list(dict.fromkeys(as_list(keys)))
    missing = [key for key in names if key not in existing]
    if missing:
        raise KeyError(f"{where}: there is no {missing}; there is {sorted(existing)}.")
    return names


def row_index(rows: Any, length: int) -> np.ndarray:
    """Index list, array, tensor or boolean mask as a checked, non-negative int64 array."""
    index = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)
    if index.dtype == bool:
        if index.shape != (length,):
            raise IndexError(f"DataProto: a mask of shape {index.shape} for {length} rows.")
        return np.flatnonzero(index)
    if index.shape == (0,):
        return np.empty(0, dtype=np.int64)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise IndexError(
            f"DataProto: rows must be integers or a mask in one dimension, not {index.dtype} {index.shape}."
        )
    index = index.astype(np.int64)
    outside = index[(index < -length) | (index >= length)]
    if outside.size:
        raise IndexError(f"DataProto: row {outside[0]} of {length}.")
    return np.where(index < 0, index + length, index)


def repeat_counts(times: Any, length: int) -> np.ndarray:
    """How often to repeat each of `length` rows, checked."""
    counts = np.asarray(times.cpu() if isinstance(times, torch.Tensor) else times)
    if counts.shape != (length,):
        raise ValueError(f"DataProto.sample_level_repeat: {length} rows need {length} counts; got {counts.shape}.")
    if counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0):
        raise ValueError(
            f"DataProto.sample_level_repeat: counts are whole numbers ≥ 0; got {counts.dtype}, least {counts.min()}."
        )
    return counts.astype(np.int64)


def mini_batch_rows(
    length: int, size: int, epochs: int, seed: int | None, shuffle: bool, drop_last: bool
) -> Iterator[slice | np.ndarray]:
    """The rows of each mini-batch in `epochs` passes: slices in order, or index arrays of a new shuffle per pass."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    end = length - length % size if drop_last else length
    for _ in range(epochs):
        order = torch.randperm(length, generator=generator).numpy() if shuffle else None
        for start in range(0, end, size):
            rows = slice(start, min(start + size, end))
            yield rows if order is None else order[rows]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A quick look that settles most comparisons: eight bytes at a time, several times faster than torch.equal."""
    if a.device.type != "cpu" or not (a.is_contiguous() and b.is_contiguous()):
        return torch.equal(a, b)
    mine, theirs = tensor_to_wire(a)[0], tensor_to_wire(b)[0]
    words = mine.nbytes // 8 * 8
    same_words = np.array_equal(mine[:words].view(np.int64), theirs[:words].view(np.int64))
    return same_words and np.array_equal(mine[words:], theirs[words:])


def _rows_match(a: Any, b: Any) -> bool:
    if a.shape[1:] != b.shape[1:]:
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device
    # numpy would turn numbers into strings rather than refuse; objects hold anything.
    kinds = {a.dtype.kind, b.dtype.kind} - {"O"}
    return len(kinds) < 2 or kinds <= set(_NUMBERS)


def _describe(column: Any) -> str:
    device = f" on {column.device}" if isinstance(column, torch.Tensor) and column.device.type != "cpu" else ""
    return f"{column.dtype} {tuple(column.shape)}{device}"
