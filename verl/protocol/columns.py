"""Columns of a DataProto: containers that also read aliases, validation, serialization, union and concatenation."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from verl.types.schema import ALIASES, COLUMNS, SEQUENCE, stored_name
from verl.utils.nested import (
    deep_equal,
    describe_difference,
    load_plain,
    object_array,
    save_plain,
    tensor_from_wire,
    tensor_to_wire,
)
from verl.utils.py_functional import append_to_dict
from verl.utils.tensordicts import TensorDict, TensorDictBase

Rows: TypeAlias = "slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor"
Keys: TypeAlias = "str | Sequence[str] | None"
Parts: TypeAlias = tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]
"""Tensor columns, object columns and metadata of a batch."""
_FILE_FORMAT = "verl.DataProto/1"


class TensorColumns(TensorDict):
    """Tensor columns. `keys()` are the stored columns; aliases of `verl.types.schema` can be read as well.

    An alias returns a copy: `batch["old_log_probs"] += 1` must not change `rollout_log_probs`.
    """

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str) and (stored := stored_name(index, self.keys())) != index:
            return super().__getitem__(stored).clone()
        return super().__getitem__(index)

    def get(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(key, str) and (stored := stored_name(key, self.keys())) != key:
            return super().get(stored).clone()
        return super().get(key, *args, **kwargs)


class ObjectColumns(dict[str, Any]):
    """Object columns of a batch, or the objects of one row. Aliases can be read as well."""

    def __missing__(self, name: str) -> Any:
        stored = stored_name(name, self)
        if stored == name:
            raise KeyError(name)
        return aliased_value(name, self[stored])

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if stored_name(name, self) in self else default


def aliased_value(name: str, value: Any) -> Any:
    """The value of the alias `name`, from a stored column (an object array) or from one of its entries."""
    entry = ALIASES[name].entry
    if entry is None:
        return value
    if isinstance(value, np.ndarray):
        return object_array([(row or {}).get(entry) for row in value])
    return (value or {}).get(entry)


# ---------------------------------------------------------------- validation


def check_columns(tensors: TensorDict | None, arrays: Mapping[str, Any]) -> None:
    """Raise ValueError unless all columns are tensors or arrays with the same number of rows."""
    first = None
    if tensors is not None:
        if len(tensors.batch_size) == 0:
            raise ValueError("DataProto: batch has no batch dimension. Set the batch_size of the TensorDict.")
        if len(tensors.batch_size) > 1 and arrays:
            raise ValueError(
                f"DataProto: batch has size {tuple(tensors.batch_size)}, but object arrays {sorted(arrays)} have one"
                " row dimension. Unfold the batch first."
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
                " entry per row (verl.protocol.object_array converts a list)."
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
            raise ValueError(
                f"DataProto: {key!r} has batch size {tuple(value.shape[:dims])}, {first_key!r} has"
                f" {tuple(first.shape[:dims])}."
            )
    return tuple(first.shape[:dims])


def as_tensordict(batch: TensorDict | Mapping[str, torch.Tensor] | None) -> TensorDict | None:
    """Convert a TensorDict, or a dict of tensors with a common first dimension, to `TensorColumns`.

    Other TensorDictBase classes (LazyStackedTensorDict, PersistentTensorDict) are returned unchanged.
    """
    if isinstance(batch, TensorDict) and not isinstance(batch, TensorColumns):
        return TensorColumns(dict(batch.items()), batch_size=batch.batch_size, device=batch.device)
    if batch is None or isinstance(batch, TensorDictBase):
        return batch
    if not isinstance(batch, Mapping):
        raise ValueError(f"DataProto: batch is a {type(batch).__name__}; pass a TensorDict or a dict of tensors.")
    return TensorColumns(dict(batch), batch_size=common_batch_size(batch, 1)) if batch else None


def as_list(keys: Keys) -> list[str]:
    """Convert None, one key or several keys to a list."""
    if keys is None:
        return []
    return [keys] if isinstance(keys, str) else list(keys)


def known_keys(keys: Keys, existing: Collection[str], where: str) -> list[str]:
    """The keys as a list without duplicates. Raises KeyError for keys that do not exist."""
    names = list(dict.fromkeys(as_list(keys)))
    missing = [key for key in names if key not in existing]
    if missing:
        raise KeyError(f"{where}: {missing} not found; existing: {sorted(existing)}.")
    return names


def rename_mapping(old_keys: Keys, new_keys: Keys, columns: Collection[str], where: str) -> dict[str, str]:
    """Validated mapping from old to new column names."""
    old, new = as_list(old_keys), as_list(new_keys)
    if len(old) != len(new) or len(set(old)) != len(old):
        raise ValueError(
            f"DataProto.rename: {len(old)} old keys {old} for {len(new)} new keys {new}; pass one for each."
        )
    known_keys(old, columns, where)
    for key in new:
        if key in set(columns) - set(old) or new.count(key) > 1:
            raise ValueError(f"DataProto.rename: two columns would be named {key!r}.")
    return dict(zip(old, new, strict=True))


def row_index(rows: Any, length: int) -> np.ndarray:
    """Convert an index list, array, tensor or boolean mask to a validated, non-negative int64 array."""
    index = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)
    if index.dtype == bool:
        if index.shape != (length,):
            raise IndexError(f"DataProto: a mask of shape {index.shape} does not fit a batch of {length} rows.")
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
        raise IndexError(f"DataProto: row {outside[0]} does not exist; the batch has {length} rows.")
    return np.where(index < 0, index + length, index)


def repeat_counts(times: Any, length: int) -> np.ndarray:
    """Validated repeat counts of `length` rows, int64."""
    counts = np.asarray(times.cpu() if isinstance(times, torch.Tensor) else times)
    if counts.shape != (length,):
        raise ValueError(f"DataProto.sample_level_repeat: {length} rows need {length} counts; got {counts.shape}.")
    if counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0):
        raise ValueError(
            f"DataProto.sample_level_repeat: counts must be integers ≥ 0; got {counts.dtype}, minimum {counts.min()}."
        )
    return counts.astype(np.int64)


def mini_batch_rows(
    length: int, size: int, epochs: int, seed: int | None, options: Mapping[str, Any]
) -> Iterator[slice | np.ndarray]:
    """Rows of each mini-batch in `epochs` passes: consecutive slices, or with shuffle index arrays (new every pass)."""
    unknown = options.keys() - {"shuffle", "drop_last"}
    if unknown:
        raise ValueError(
            f"DataProto.make_iterator: unknown dataloader_kwargs {sorted(unknown)}; known: shuffle, drop_last."
        )
    if size < 1:
        raise ValueError(f"DataProto.make_iterator: mini_batch_size is {size}; it must be at least 1.")
    if length % size and options.get("drop_last") is None:
        raise ValueError(
            f"DataProto.make_iterator: {length} rows do not divide into mini-batches of {size}."
            " Choose a divisor, or set drop_last in dataloader_kwargs."
        )
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    end = length - length % size if options.get("drop_last") else length
    return _mini_batches(length, end, size, epochs, generator if options.get("shuffle") else None)


def _mini_batches(
    length: int, end: int, size: int, epochs: int, generator: torch.Generator | None
) -> Iterator[slice | np.ndarray]:
    for _ in range(epochs):
        order = None if generator is None else torch.randperm(length, generator=generator).numpy()
        for start in range(0, end, size):
            rows = slice(start, min(start + size, end))
            yield rows if order is None else order[rows]


# ---------------------------------------------------------------- serialization


def to_state(td: TensorDict | None, arrays: dict[str, np.ndarray], meta: dict[str, Any], borrowed: bool) -> Any:
    """Picklable state: tensors become byte arrays, which pickle protocol 5 (Ray, multiprocessing) sends separately.

    `borrowed`: the tensors alias shared memory; the flag is kept by marking the arrays read-only.
    """
    state = _fields(td, arrays, meta)
    state["tensors"] = {key: tensor_to_wire(value) for key, value in state["tensors"].items()}
    for data, _, _ in state["tensors"].values() if borrowed else ():
        data.flags.writeable = False  # tensor.numpy() does not preserve this
    return state


def from_state(state: dict[str, Any]) -> tuple[Parts, bool]:
    """The batch, and whether its tensors alias shared, read-only memory."""
    wires = state["tensors"]
    arrays = {key: a if a.flags.writeable else a.copy() for key, a in state["non_tensor_batch"].items()}
    td = _tensordict({key: tensor_from_wire(wire) for key, wire in wires.items()}, state["batch_size"])
    return (td, arrays, state["meta_info"]), any(not wire[0].flags.writeable for wire in wires.values())


def save_parts(parts: Parts, path: str | os.PathLike) -> None:
    """Write a batch to one file, atomically."""
    save_plain({"format": _FILE_FORMAT, **_fields(*parts)}, path, what="DataProto")


def load_parts(path: str | os.PathLike) -> Parts:
    """Read a file of `save_parts`."""
    content = load_plain(path)
    if not isinstance(content, dict) or content.get("format") != _FILE_FORMAT:
        raise ValueError(f"{path}: not a DataProto file (no format {_FILE_FORMAT!r}). Write it with save_to_disk.")
    return _tensordict(content["tensors"], content["batch_size"]), content["non_tensor_batch"], content["meta_info"]


def _fields(td: TensorDict | None, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> dict[str, Any]:
    size, tensors = (None, {}) if td is None else (list(td.batch_size), dict(td.items()))
    return {"batch_size": size, "tensors": tensors, "non_tensor_batch": dict(arrays), "meta_info": meta}


def _tensordict(tensors: dict[str, Any], batch_size: list[int] | None) -> TensorDict | None:
    return None if batch_size is None else TensorColumns(tensors, batch_size=batch_size)


# ---------------------------------------------------------------- union and concatenation of batches


_NUMBERS = set("biufc")  # numpy kinds that promote to each other without loss of meaning


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """A new dict of both dicts' entries; a key in both must hold equal tensors. The inputs are not changed."""
    if tensor_dict1 is None or tensor_dict2 is None:
        only = tensor_dict2 if tensor_dict1 is None else tensor_dict1
        return None if only is None else only.copy()
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise ValueError(f"union: the batch sizes {sizes} differ; they must be equal.")
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
