"""BatchRef: a DataProto whose columns stay in the object store.

It holds references to stored columns and an index from rows of the batch to stored rows. Row and column operations edit
only the index. A worker reads the rows of its shard; the controller fetches only the columns that are accessed by name,
each once. Columns set on the controller are stored when they are first sent. In-place writes to a fetched tensor are
detected; the tensor is stored again when the batch is next sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from verl.protocol import DataProto, DataProtoItem
from verl.protocol.columns import (
    TensorColumns,
    aliased_value,
    concat_meta,
    continued_columns,
    rename_mapping,
    union_meta,
)
from verl.single_controller.ray import column_store
from verl.single_controller.ray.column_store import Lengths, StoredColumn, StoredRows, store_rows
from verl.types.schema import OBJECT, stored_name
from verl.utils.nested import deep_equal


class _LocalColumn(NamedTuple):
    """The value of a column in this process."""

    value: torch.Tensor | np.ndarray
    stored_version: int | None
    """`_tensor_version` of the value when it was stored or fetched; None: not stored."""


class BatchRef(DataProto):
    """A batch by reference. Behaves like a DataProto; `fetch()` returns a real one."""

    def __init__(self, columns: dict[str, StoredColumn], rows: int, meta_info: dict[str, Any]) -> None:
        self._columns, self._rows, self.meta_info = columns, rows, meta_info
        self._local: dict[str, _LocalColumn] = {}
        self._borrowed = False  # attribute of DataProto (copy on write); fetched columns are copies already

    @classmethod
    def from_stored(cls, part: StoredRows) -> BatchRef:
        """Refer to the rows that a worker stored."""
        return cls(dict(part.columns), part.rows, dict(part.meta_info))

    @classmethod
    def from_dataproto(cls, data: DataProto, lengths: Lengths | None = None) -> BatchRef:
        """Store a local batch and refer to it. Its object columns are stored only when they are sent."""
        if isinstance(data, BatchRef):
            return data
        batch = cls.from_stored(store_rows(data.select(non_tensor_batch_keys=[]), lengths))
        batch._rows = len(data)
        for name, array in data.non_tensor_batch.items():
            batch._set_column(name, array)
        return batch

    def fetch(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        rows: np.ndarray | None = None,
    ) -> DataProto:
        """Return a plain DataProto of these columns (None: all) and rows (None: all). Columns that are already fetched
        are not copied, unless `rows` are selected."""
        tensor_names, object_names = self._selected_names(batch_keys, non_tensor_batch_keys)
        values = self._read([*tensor_names, *object_names], rows)
        td = None
        if tensor_names:
            count = len(self) if rows is None else len(rows)
            td = TensorColumns({name: values[name] for name in tensor_names}, batch_size=[count])
        return DataProto(td, {name: values[name] for name in object_names}, dict(self.meta_info))

    @property
    def lengths(self) -> Lengths | None:
        """Prompt and response lengths of every row, known without fetching; None for batches without a mask."""
        known = [column.rows.lengths for column in self._columns.values() if column.rows.lengths is not None]
        # Columns of a prompt batch were stored with response lengths 0, those of the generated batch with the complete
        # lengths.
        return max(known, key=lambda lengths: lengths.widths[1], default=None)

    # ---------------------------------------------------------------- interface of DataProto

    @property
    def batch(self) -> Any:
        """The tensor columns, each fetched on first access."""
        return _TensorColumns(self, self._tensor_keys)

    @batch.setter
    def batch(self, value: Any) -> None:
        self._replace(self._tensor_keys(), value)

    @property
    def non_tensor_batch(self) -> Any:
        """The object columns, each fetched on first access."""
        return _Columns(self, self._object_keys)

    @non_tensor_batch.setter
    def non_tensor_batch(self, value: Any) -> None:
        self._replace(self._object_keys(), value)

    @property
    def _td(self) -> Any:
        return self.fetch(non_tensor_batch_keys=[])._td

    def __len__(self) -> int:
        return self._rows

    def check_consistency(self) -> None:
        """No effect: columns are aligned by construction."""

    def get_data_info(self) -> str:
        lines = [f"BatchRef of {len(self)} rows"]
        for name in self._names():
            state = "not stored yet"
            if not self._is_unstored(name):
                state = f"{self._columns[name].type} in {len(self._columns[name].refs)} part(s)"
            lines.append(f"{name}: {state}")
        return "\n  ".join([*lines, f"meta_info: {sorted(self.meta_info)}"])

    def to(self, device: str | torch.device) -> DataProto:
        """Return the batch itself for the CPU, and a fetched DataProto for another device."""
        return self if torch.device(device).type == "cpu" else self.fetch().to(device)

    def select(
        self,
        batch_keys: Any = None,
        non_tensor_batch_keys: Any = None,
        meta_info_keys: Any = None,
        deepcopy: bool = False,
    ) -> BatchRef:
        """Return a batch of the selected columns (None: all of that kind).

        `deepcopy` has no effect, because stored columns are immutable.
        """
        tensor_names, object_names = self._selected_names(batch_keys, non_tensor_batch_keys)
        meta = self._subset(self.meta_info, meta_info_keys, "meta_info")
        return BatchRef(self._stored([*tensor_names, *object_names]), len(self), meta)

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> BatchRef:
        mapping = rename_mapping(old_keys, new_keys, self._names(), "BatchRef.columns")
        self._columns = {mapping.get(name, name): column for name, column in self._columns.items()}
        self._local = {mapping.get(name, name): value for name, value in self._local.items()}
        return self

    def union(self, other: DataProto) -> BatchRef:
        if self._has_columns() and other._has_columns() and len(other) != len(self):
            raise ValueError(f"BatchRef.union: {len(self)} rows cannot be joined with {len(other)} rows.")
        meta = union_meta(self.meta_info, other.meta_info)
        if other._has_columns():
            self._merge_columns(BatchRef.from_dataproto(other, self.lengths))
        self.meta_info = meta
        return self

    def _merge_columns(self, other: BatchRef) -> None:
        """Add the columns of `other`. A column that both batches have must be equal."""
        # Sequence columns of a prompt batch are replaced by those of the generated batch, which continue them.
        self._drop(continued_columns(self.batch, other.batch))
        continued = continued_columns(other.batch, self.batch)
        names = [name for name in other._names() if name not in continued]
        new = [name for name in names if name not in self._names()]
        for name in names:
            if name not in new and not self._is_same(name, other):
                raise ValueError(f"BatchRef.union: {name!r} differs in the two batches.")
        for name in new:
            if other._is_unstored(name):
                self._set_local(name, other._local[name].value, stored=False)
            else:
                self._columns[name] = other._columns[name]
        self._rows = len(other)

    # ---------------------------------------------------------------- primitives

    def _take(self, rows: slice | np.ndarray) -> BatchRef:
        count = len(range(*rows.indices(len(self)))) if isinstance(rows, slice) else len(rows)
        return BatchRef(column_store.take_rows(self._stored(), rows), count, dict(self.meta_info))

    @classmethod
    def _concat(cls, parts: Sequence[DataProto]) -> BatchRef:
        batches = [cls.from_dataproto(part) for part in parts]
        meta = concat_meta([batch.meta_info for batch in batches])
        # Skip parts without rows (ranks that got only fillers): the column types cannot be inferred from them.
        filled = [batch for batch in batches if len(batch)] or batches[:1]
        return cls(column_store.concat_columns([batch._stored() for batch in filled]), sum(map(len, filled)), meta)

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"DataProto: row {row} does not exist; the batch has {len(self)} rows.")
        row %= len(self)
        return self._take(slice(row, row + 1)).fetch()[0]

    def _selected_names(self, batch_keys: Any, non_tensor_batch_keys: Any) -> tuple[list[str], list[str]]:
        tensors, objects = self._tensor_keys(), self._object_keys()
        tensor_names = self._known(tensors if batch_keys is None else batch_keys, tensors, "batch")
        keys = objects if non_tensor_batch_keys is None else non_tensor_batch_keys
        return tensor_names, self._known(keys, objects, "non_tensor_batch")

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._read(self._tensor_keys()).items())

    def _names(self) -> list[str]:
        return [*self._columns, *(name for name in self._local if name not in self._columns)]

    def _tensor_keys(self) -> list[str]:
        return [name for name in self._names() if not self._is_object(name)]

    def _object_keys(self) -> list[str]:
        return [name for name in self._names() if self._is_object(name)]

    def _is_object(self, name: str) -> bool:
        if name in self._local:
            return isinstance(self._local[name].value, np.ndarray)
        return self._columns[name].type.axis == OBJECT

    def _has_columns(self) -> bool:
        return bool(self._columns or self._local)

    def _read(self, names: Sequence[str], rows: np.ndarray | None = None) -> dict[str, Any]:
        """Return the values of these columns, local or from the store; `rows`: of these rows (None: all)."""
        stored = {name: self._columns[name] for name in names if name not in self._local}
        local = {name: self._local[name].value for name in names if name in self._local}
        if rows is not None:
            stored = column_store.take_rows(stored, rows)
            local = {name: value[rows] for name, value in local.items()}
        fetched = column_store.read_columns(stored)
        return {name: local[name] if name in local else fetched[name] for name in names}

    def _get_column(self, name: str) -> Any:
        """Return the value of a column, fetched once. The caller may write into it if it is a tensor."""
        if name not in self._local:
            self._set_local(name, self._read([name])[name], stored=True)
        return self._local[name].value

    def _set_local(self, name: str, value: Any, stored: bool) -> None:
        if isinstance(value, np.ndarray):  # writes into an array cannot be detected
            value = value.view()
            value.flags.writeable = False
        self._local[name] = _LocalColumn(value, _tensor_version(value) if stored else None)

    def _set_column(self, name: str, value: torch.Tensor | np.ndarray) -> None:
        if self._has_columns() and len(value) != len(self):
            raise ValueError(f"DataProto: {name!r} has {len(value)} rows, the batch has {len(self)}.")
        DataProto.from_single_dict({name: value})  # validates the column
        self._set_local(name, value, stored=False)
        self._rows = len(value)

    def _is_same(self, name: str, other: BatchRef) -> bool:
        is_stored = not (self._is_unstored(name) or other._is_unstored(name))
        if is_stored and self._columns[name].same_as(other._columns[name]):
            return True
        return deep_equal(self._read([name]), other._read([name]))

    def _is_unstored(self, name: str) -> bool:
        """Whether the local value of the column was never stored, or was changed since."""
        column = self._local.get(name)
        return column is not None and column.stored_version != _tensor_version(column.value)

    def _replace(self, names: list[str], value: Any) -> None:
        """Replace the columns `names` by those of a mapping."""
        new = {} if value is None else dict(value.items())
        self._drop(names)
        for name, column in new.items():
            self._set_column(name, column)

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._columns.pop(name, None)
            self._local.pop(name, None)

    def _stored(self, names: Sequence[str] | None = None) -> dict[str, StoredColumn]:
        """Return these columns (None: all) in the store. New and changed columns are stored first."""
        names = self._names() if names is None else names
        for name in names:
            if self._is_unstored(name):
                value = self._local[name].value
                self._columns |= store_rows(DataProto.from_single_dict({name: value}), self.lengths).columns
                self._set_local(name, value, stored=True)
        return {name: self._columns[name] for name in names}

    # ---------------------------------------------------------------- wire

    def __getstate__(self) -> dict[str, Any]:
        """References to the parts in use, no values."""
        return {"columns": column_store.prune_parts(self._stored()), "rows": self._rows, "meta_info": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BatchRef.__init__(self, state["columns"], state["rows"], state["meta_info"])

    def __copy__(self) -> BatchRef:
        """A batch of the same columns, for another thread; nothing is stored or fetched."""
        copied = BatchRef(dict(self._columns), len(self), dict(self.meta_info))
        copied._local = dict(self._local)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchRef:
        return BatchRef(self._stored(), len(self), dict(self.meta_info))


class _Columns(MutableMapping[str, Any]):
    """The tensor or object columns of a BatchRef as a mapping."""

    def __init__(self, owner: BatchRef, names: Callable[[], list[str]]) -> None:
        self._owner, self._names = owner, names

    def __getitem__(self, name: str) -> Any:
        stored = stored_name(name, self._names())
        if stored not in self._names():
            raise KeyError(f"BatchRef has no column {name!r}; it has {sorted(self._names())}.")
        column = self._owner._get_column(stored)
        return column if stored == name else aliased_value(name, column)

    def __setitem__(self, name: str, value: Any) -> None:
        self._owner._set_column(name, value)

    def __delitem__(self, name: str) -> None:
        if name not in self._names():
            raise KeyError(name)
        self._owner._drop([name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __len__(self) -> int:
        return len(self._names())


class _TensorColumns(_Columns):
    """Behaves like the TensorDict of a DataProto. Operations other than those of a mapping fetch all columns."""

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([len(self._owner)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.fetch(non_tensor_batch_keys=[]).batch, name)


def _tensor_version(value: Any) -> int:
    """Return torch's version counter, which in-place writes to a tensor or its views increment; 0 for arrays."""
    return value._version if isinstance(value, torch.Tensor) else 0
