"""DataProto: the batch type exchanged between controller and workers.

Rows are samples. `batch` holds tensors (a TensorDict), `non_tensor_batch` object arrays with the same number of rows,
`meta_info` any metadata of the batch. Row operations apply to all columns and return views where torch allows. They
use two primitives, `_take` (rows by slice or index) and `_concat`, which `single_controller.ray.BatchRef` overrides.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from verl.protocol.columns import (
    Keys,
    ObjectColumns,
    Rows,
    TensorColumns,
    as_list,
    as_tensordict,
    check_columns,
    common_batch_size,
    concat_columns,
    concat_meta,
    continued_columns,
    from_state,
    known_keys,
    load_parts,
    mini_batch_rows,
    rename_mapping,
    repeat_counts,
    row_index,
    save_parts,
    to_state,
    union_meta,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.types.schema import stored_name
from verl.utils.nested import object_array
from verl.utils.py_functional import keyword_aliases
from verl.utils.tensordicts import NonTensorStack, TensorDict, is_non_tensor

_AUTO_PADDING = "_verl_auto_padding"


class DataProtoConfig:
    """Process-wide settings."""

    auto_padding: ClassVar[bool] = os.environ.get("VERL_AUTO_PADDING", "1").lower() not in ("0", "false")
    """Whether a group call may add filler rows to a batch that does not divide over its ranks; results have none."""


@dataclass
class DataProtoItem:
    """One row of a DataProto."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """A batch of samples: tensors, object arrays and metadata, aligned by row."""

    def __init__(
        self,
        batch: TensorDict | Mapping[str, torch.Tensor] | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self._td: Any = as_tensordict(batch)
        # True while the tensors alias shared, read-only memory (an object store). Access by `batch` copies them first.
        self._borrowed = False
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info: dict[str, Any] = {} if meta_info is None else meta_info
        self.check_consistency()

    # ---------------------------------------------------------------- constructors and conversion

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Tensors become `batch`, numpy arrays `non_tensor_batch`."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        arrays = {k: v for k, v in data.items() if isinstance(v, np.ndarray)}
        for key in data.keys() - tensors.keys() - arrays.keys():
            raise ValueError(
                f"DataProto.from_single_dict: {key!r} is a {type(data[key]).__name__}; pass a torch.Tensor or a numpy"
                " array (verl.protocol.object_array converts a list)."
            )
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Tensors share their first `num_batch_dims` dimensions; non-tensors are arrays or lists of that length."""
        if num_batch_dims < 1:
            raise ValueError(f"DataProto.from_dict: num_batch_dims is {num_batch_dims}; it must be at least 1.")
        if num_batch_dims > 1 and non_tensors:
            raise ValueError(
                "DataProto.from_dict: non_tensors need num_batch_dims=1 (object arrays have one row dimension)."
            )
        batch = None
        if tensors:
            batch = TensorColumns(dict(tensors), batch_size=common_batch_size(tensors, num_batch_dims))
        arrays = {k: v if isinstance(v, np.ndarray) else object_array(v) for k, v in (non_tensors or {}).items()}
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[_AUTO_PADDING] = True
        return cls(batch, arrays, meta_info)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None) -> DataProto:
        """Tensor entries become `batch`; non-tensor entries (`NonTensorStack`, `NonTensorData`) object arrays."""
        tensors: dict[str, torch.Tensor] = {}
        arrays: dict[str, np.ndarray] = {}
        for key in tensor_dict.keys():
            value = tensor_dict.get(key)
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif is_non_tensor(value):
                arrays[key] = object_array(value.tolist())
            else:
                raise ValueError(f"DataProto.from_tensordict: {key!r} is a {type(value).__name__}. Flatten it first.")
        size, device = tensor_dict.batch_size, tensor_dict.device
        batch = TensorColumns(tensors, batch_size=size, device=device) if tensors else None
        return cls(batch, arrays, dict(meta_info or {}))

    def to_tensordict(self) -> TensorDict:
        """Tensors and objects in one TensorDict, the inverse of `from_tensordict`, without the metadata."""
        objects = {key: NonTensorStack(*array.tolist()) for key, array in self.non_tensor_batch.items()}
        size = self._td.batch_size if self._td is not None else [len(self)]
        return TensorDict({**dict(self.tensors()), **objects}, batch_size=size)

    # ---------------------------------------------------------------- access

    @property
    def batch(self) -> TensorDict:
        """The tensors, writable: tensors in shared, read-only memory are copied first."""
        if self._borrowed:
            self._td = self._td.clone()
            self._borrowed = False
        return self._td

    @batch.setter
    def batch(self, value: TensorDict | Mapping[str, torch.Tensor] | None) -> None:
        self._td = as_tensordict(value)
        self._borrowed = False

    @property
    def non_tensor_batch(self) -> dict[str, np.ndarray]:
        """The object arrays by name. Like `batch`, it also reads the aliases of `verl.types.schema`."""
        return self._arrays

    @non_tensor_batch.setter
    def non_tensor_batch(self, value: dict[str, np.ndarray]) -> None:
        self._arrays = value if isinstance(value, ObjectColumns) else ObjectColumns(value)

    def __len__(self) -> int:
        if self._td is not None:
            return self._td.batch_size[0]
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def __getitem__(self, rows: int | str | Rows) -> Any:
        """By name: a column. By int: a `DataProtoItem`. By slice, mask or index array: a DataProto of these rows."""
        if isinstance(rows, str):
            (stored,) = self._known(rows, self._names(), "columns")
            return (self.non_tensor_batch if stored in self.non_tensor_batch else self.batch)[rows]
        if isinstance(rows, int | np.integer) or (isinstance(rows, torch.Tensor) and rows.ndim == 0):
            return self._item(int(rows))
        return self._take(rows if isinstance(rows, slice) else row_index(rows, len(self)))

    def check_consistency(self) -> None:
        """Raise ValueError unless all columns are tensors or arrays with the same number of rows."""
        check_columns(self._td, self.non_tensor_batch)

    def get_data_info(self) -> str:
        """One line per column: name, type, shape."""
        title = f"{type(self).__name__} of {len(self)} rows"
        lines = []
        for key, value in self.tensors():
            lines.append(f"{key}: {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}")
        for key, array in self.non_tensor_batch.items():
            entry_type = type(array.flat[0]).__name__ if array.dtype == object and array.size else array.dtype
            lines.append(f"{key}: array of {entry_type} {array.shape}")
        return "\n  ".join([title, *lines, f"meta_info: {sorted(self.meta_info)}"])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' rows, not of the storage that views share."""
        return sum(value.nbytes for _, value in self.tensors())

    def is_padding_enabled(self) -> bool:
        """Whether a group call may add filler rows if this batch does not divide over the ranks."""
        return bool(self.meta_info.get(_AUTO_PADDING)) or DataProtoConfig.auto_padding

    # ---------------------------------------------------------------- columns

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A DataProto of the named columns (None: all of that kind), sharing their memory unless `deepcopy`.

        An alias selects the column that it reads, under the name of the column.
        """
        names = self._known(self._tensor_keys() if batch_keys is None else batch_keys, self._tensor_keys(), "batch")
        td = self._td.select(*names) if self._td is not None else None
        arrays = self._subset(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta = self._subset(self.meta_info, meta_info_keys, "meta_info")
        selected = self._like(td, arrays, meta)
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None
    ) -> DataProto:
        """Move the named columns out of this batch into a new one. An unknown key or an alias changes nothing."""
        for name in [*(batch_keys or []), *(non_tensor_batch_keys or [])]:
            stored = stored_name(name, self._names())
            if stored != name:
                raise KeyError(
                    f"{type(self).__name__}.pop: {name!r} is an alias of {stored!r}. Pop {stored!r} instead."
                )
        popped = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        if not popped._tensor_keys():
            popped.batch = None
        self._drop([*popped._tensor_keys(), *popped.non_tensor_batch])
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: Keys = None, new_keys: Keys = None) -> DataProto:
        """Rename columns (tensors or object arrays) in place; returns self."""
        mapping = rename_mapping(old_keys, new_keys, self._names(), f"{type(self).__name__}.columns")
        if self._td is not None:
            renamed = {mapping.get(k, k): v for k, v in self.tensors()}
            self._td = TensorColumns(renamed, batch_size=self._td.batch_size, device=self._td.device)
        self.non_tensor_batch = {mapping.get(k, k): v for k, v in self.non_tensor_batch.items()}
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and metadata of `other` in place; keys in both must have equal values. Returns self.

        A batch of prompts may be joined with the responses generated from it: `input_ids`, `attention_mask` and
        `position_ids` become those of the whole sequences.
        """
        self.check_consistency()
        other.check_consistency()
        if self._has_columns() and other._has_columns() and len(self) != len(other):
            raise ValueError(f"DataProto.union: {len(self)} rows cannot be joined with {len(other)} rows.")
        for key in [*self._tensor_keys(), *other._tensor_keys()]:
            if key in self.non_tensor_batch or key in other.non_tensor_batch:
                raise ValueError(f"DataProto.union: {key!r} is a tensor in one and an object array in the other.")
        td = _union_tensors(self._td, other._td)
        arrays = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        meta = union_meta(self.meta_info, other.meta_info)
        if td is not None:
            self._borrowed = self._borrowed or other._borrowed
        self._td, self.non_tensor_batch, self.meta_info = td, arrays, meta
        return self

    # ---------------------------------------------------------------- rows

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows start:end:step, as views."""
        return self._take(slice(start, end, step))

    def select_idxs(self, idxs: Rows) -> DataProto:
        """Rows by index array or boolean mask."""
        return self._take(row_index(idxs, len(self)))

    def reorder(self, indices: Rows) -> None:
        """Permute or select rows in place: the new row i is the old row `indices[i]`."""
        taken = self._take(row_index(indices, len(self)))
        self.__dict__.update(taken.__dict__)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times: a a b b (interleave) or a b a b."""
        if repeat_times < 1:
            raise ValueError(f"DataProto.repeat: repeat_times is {repeat_times}; it must be at least 1.")
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    @keyword_aliases(repeat_times="times")
    def sample_level_repeat(self, times: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Row i `times[i]` times (0 drops it), in order."""
        return self._take(np.repeat(np.arange(len(self)), repeat_counts(times, len(self))))

    def unfold_column_chunks(self, n_split: int, split_keys: Keys = None) -> DataProto:
        """Split each row into `n_split` rows: columns in `split_keys` are split along their second dimension, others
        repeated."""
        keys = self._known(split_keys, self._names(), "columns")
        for key in keys:
            shape = tuple(self[key].shape)
            if n_split < 1 or len(shape) < 2 or shape[1] % n_split:
                raise ValueError(
                    f"DataProto.unfold_column_chunks: {key!r} of shape {shape} cannot be split into {n_split} parts."
                )
        split_columns = {key: self[key].reshape(len(self) * n_split, -1, *self[key].shape[2:]) for key in keys}
        unfolded = self.repeat(n_split, interleave=True)
        for key, column in split_columns.items():
            (unfolded.batch if isinstance(column, torch.Tensor) else unfolded.non_tensor_batch)[key] = column
        return unfolded

    def split(self, split_size: int | None = None, n_parts: int | None = None) -> list[DataProto]:
        """Consecutive parts of `split_size` rows (the last may be shorter), as views; an empty batch is one part.

        With `n_parts` instead: exactly this number of parts, whose sizes differ by at most one row.
        """
        if (split_size is None) == (n_parts is None):
            raise ValueError("DataProto.split: pass either split_size (rows of a part) or n_parts (number of parts).")
        if n_parts is not None:
            if n_parts < 1:
                raise ValueError(f"DataProto.split: n_parts is {n_parts}; it must be at least 1.")
            return self._parts(n_parts)
        assert split_size is not None
        if split_size < 1:
            raise ValueError(f"DataProto.split: split_size is {split_size}; it must be at least 1.")
        return [self._take(slice(i, i + split_size)) for i in range(0, max(len(self), 1), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` consecutive parts of equal size, as views. If the batch was created with auto_padding, sizes may
        differ by one row."""
        if chunks < 1:
            raise ValueError(f"DataProto.chunk: chunks is {chunks}; it must be at least 1.")
        if len(self) % chunks and not self.meta_info.get(_AUTO_PADDING):
            raise ValueError(
                f"DataProto.chunk: {len(self)} rows do not divide into {chunks} chunks."
                " Pad first (pad_dataproto_to_divisor) or create the batch with auto_padding=True."
            )
        return self._parts(chunks)

    def _parts(self, count: int) -> list[DataProto]:
        bounds = [len(self) * i // count for i in range(count + 1)]
        return [self._take(slice(a, b)) for a, b in itertools.pairwise(bounds)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """All rows of the parts, in order. The parts must have the same columns, and equal values of common metadata;
        `metrics` may differ and become a dict of lists."""
        if len(data) == 0:
            raise ValueError("DataProto.concat: the list is empty.")
        # A subclass (BatchRef) concatenates without fetching its columns.
        lead = next((part for part in data if type(part) is not DataProto), data[0])
        return type(lead)._concat(data)

    @keyword_aliases(padding_size="size", padding_candidate="candidate")
    def padding(self, size: int, candidate: str = "") -> DataProto:
        """Append `size` copies of the last row (`candidate="first"`: of the first row) in place; returns self."""
        if candidate not in ("", "first", "last"):
            raise ValueError(f"DataProto.padding: candidate {candidate!r}; use 'first' or 'last'.")
        if size < 0 or (len(self) == 0 and size):
            raise ValueError(f"DataProto.padding: cannot append {size} copies of a row to {len(self)} rows.")
        source = 0 if candidate == "first" else len(self) - 1
        self.reorder(np.concatenate([np.arange(len(self)), np.full(size, source)]))
        return self

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of `epochs` passes over the rows, as views unless shuffled.

        `dataloader_kwargs`: `shuffle` (in a new order every pass, drawn from `seed`) and `drop_last`.
        """
        rows = mini_batch_rows(len(self), mini_batch_size, epochs, seed, dataloader_kwargs or {})
        return map(self._take, rows)

    def to(self, device: str | torch.device) -> DataProto:
        """Move the tensors in place; returns self."""
        if self._td is not None:
            self._td = self._td.to(device)
            self._borrowed = self._borrowed and torch.device(device).type == "cpu"  # else it was copied
        return self

    # ---------------------------------------------------------------- disk and wire

    @keyword_aliases(filepath="path")
    def save_to_disk(self, path: str | os.PathLike) -> None:
        """Write to one file, atomically. Objects must be plain data: types that could run code on load are refused."""
        self.check_consistency()
        save_parts((self._td, dict(self.non_tensor_batch), self.meta_info), path)

    @staticmethod
    @keyword_aliases(filepath="path")
    def load_from_disk(path: str | os.PathLike) -> DataProto:
        """Read a file written by `save_to_disk`; nothing in the file is executed."""
        return DataProto(*load_parts(path))

    def __getstate__(self) -> dict[str, Any]:
        self.check_consistency()
        return to_state(self._td, self.non_tensor_batch, self.meta_info, self._borrowed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        (self._td, self.non_tensor_batch, self.meta_info), self._borrowed = from_state(state)

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        td = self._td  # clone on its device: pickling would move it to the CPU
        arrays, meta = copy.deepcopy((dict(self.non_tensor_batch), self.meta_info), memo)
        return DataProto(td.clone() if td is not None else None, arrays, meta)

    # ---------------------------------------------------------------- primitives

    def _take(self, rows: Any) -> DataProto:
        """Rows by slice (views) or by a validated int64 index array (copies)."""
        self.check_consistency()
        if isinstance(rows, slice) and rows.step is not None and rows.step < 0:
            rows = np.arange(*rows.indices(len(self)))  # torch has no negative strides
        arrays = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        meta = dict(self.meta_info)
        if self._td is None:
            return self._like(None, arrays, meta)
        if isinstance(rows, slice):
            views = {key: value[rows] for key, value in self.tensors()}
            return self._like(self._with_rows(len(range(*rows.indices(len(self)))), views), arrays, meta)
        index, tensors = torch.from_numpy(rows), {}
        for key, value in self.tensors():
            index = index.to(value.device)
            tensors[key] = value.index_select(0, index)  # several times faster than value[index] on long rows
        return type(self)(self._with_rows(len(rows), tensors), arrays, meta)

    @classmethod
    def _concat(cls, parts: Sequence[DataProto]) -> DataProto:
        for part in parts:
            part.check_consistency()
        tensors = concat_columns([dict(part.tensors()) for part in parts], "DataProto.concat", "tensor")
        arrays = concat_columns([part.non_tensor_batch for part in parts], "DataProto.concat", "non-tensor")
        meta = concat_meta([part.meta_info for part in parts])
        with_td = next((part for part in parts if part._td is not None), None)
        td = with_td._with_rows(sum(map(len, parts)), tensors) if with_td is not None else None
        return cls(td, arrays, meta)

    def _with_rows(self, count: int, tensors: dict[str, torch.Tensor]) -> TensorDict:
        """A TensorDict like this one's, of `count` rows."""
        return TensorColumns(tensors, batch_size=(count, *self._td.batch_size[1:]), device=self._td.device)

    def _like(self, td: TensorDict | None, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> DataProto:
        """A batch with these contents, which alias the memory of this one; skips validation."""
        result = object.__new__(type(self))
        result._td, result.non_tensor_batch, result.meta_info = td, arrays, meta
        result._borrowed = self._borrowed and td is not None
        return result

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"DataProto: row {row} does not exist; the batch has {len(self)} rows.")
        td = self._td[row] if self._td is not None else None
        if td is not None and self._borrowed:
            td = td.clone()
        objects = ObjectColumns({key: array[row] for key, array in self.non_tensor_batch.items()})
        return DataProtoItem(td, objects, self.meta_info)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [] if self._td is None else list(self._td.items())

    def _tensor_keys(self) -> list[str]:
        return [] if self._td is None else list(self._td.keys())

    def _names(self) -> list[str]:
        return [*self._tensor_keys(), *self.non_tensor_batch]

    def _drop(self, names: Sequence[str]) -> None:
        if self._td is not None:
            self._td = self._td.exclude(*names)
        for name in names:
            self.non_tensor_batch.pop(name, None)

    def _has_columns(self) -> bool:
        return self._td is not None or bool(self.non_tensor_batch)

    def _known(self, keys: Keys, existing: Collection[str], kind: str) -> list[str]:
        """Names of the stored columns for these keys, which may be aliases."""
        names = [stored_name(key, existing) for key in as_list(keys)]
        return known_keys(names, existing, f"{type(self).__name__}.{kind}")

    def _subset(self, entries: dict[str, Any], keys: Keys, kind: str) -> dict[str, Any]:
        return dict(entries) if keys is None else {key: entries[key] for key in self._known(keys, entries, kind)}


def _union_tensors(mine: TensorDict | None, other: TensorDict | None) -> TensorDict | None:
    if mine is not None and other is not None:
        continued = continued_columns(mine, other), continued_columns(other, mine)
        mine, other = mine.exclude(*continued[0]), other.exclude(*continued[1])
    return union_tensor_dict(mine, other)
