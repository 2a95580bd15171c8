"""What is asked of a batch, checked: columns that fit together, keys, rows and mini-batches that there are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl.protocol.columns import TensorColumns

Rows: TypeAlias = "slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor"
Keys: TypeAlias = "str | Sequence[str] | None"


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


def as_tensordict(batch: TensorDict | Mapping[str, torch.Tensor] | None) -> TensorDict | None:
    """Convert a TensorDict, or a dict of tensors with a common first dimension, to `TensorColumns`.

    Other kinds of TensorDict (lazily stacked, memory-mapped) are returned unchanged.
    """
    if isinstance(batch, TensorDict) and not isinstance(batch, TensorColumns):
        return TensorColumns(dict(batch.items()), batch_size=batch.batch_size, device=batch.device)
    if batch is None or isinstance(batch, TensorDictBase):
        return batch
    if not isinstance(batch, Mapping):
        raise ValueError(f"DataProto: batch is a {type(batch).__name__}; give a TensorDict or a dict of tensors.")
    return TensorColumns(dict(batch), batch_size=common_batch_size(batch, 1)) if batch else None


def as_list(keys: Keys) -> list[str]:
    """No key, one key or several, as a list."""
    if keys is None:
        return []
    return [keys] if isinstance(keys, str) else list(keys)


def known_keys(keys: Keys, existing: Collection[str], where: str) -> list[str]:
    """The keys as a list without repetitions; a KeyError names those that do not exist."""
    names = list(dict.fromkeys(as_list(keys)))
    missing = [key for key in names if key not in existing]
    if missing:
        raise KeyError(f"{where}: there is no {missing}; there is {sorted(existing)}.")
    return names


def renaming(old_keys: Keys, new_keys: Keys, columns: Collection[str], where: str) -> dict[str, str]:
    """Old to new name of some columns."""
    old, new = as_list(old_keys), as_list(new_keys)
    if len(old) != len(new) or len(set(old)) != len(old):
        raise ValueError(f"DataProto.rename: {len(old)} old keys {old} for {len(new)} new keys {new}; pair them.")
    known_keys(old, columns, where)
    for key in new:
        if key in set(columns) - set(old) or new.count(key) > 1:
            raise ValueError(f"DataProto.rename: there would be two columns named {key!r}.")
    return dict(zip(old, new, strict=True))


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
    length: int, size: int, epochs: int, seed: int | None, options: Mapping[str, Any]
) -> Iterator[slice | np.ndarray]:
    """The rows of each mini-batch in `epochs` passes: slices in order, or index arrays of a new shuffle per pass."""
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
            " Choose a divisor, or say drop_last=True or False in dataloader_kwargs."
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
