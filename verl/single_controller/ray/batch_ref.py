"""BatchRef: a DataProto whose columns stay where they were computed.

It holds references to stored columns and, for each, which stored row every row of the batch is. Row and column
operations edit only that; a worker gathers the rows it gets, the controller fetches the columns it names, each once.
Columns set on the controller stay there until they are sent. What is written into a fetched tensor counts: it replaces
the stored column on the next use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, DataProtoItem
from verl.protocol.checks import renaming
from verl.protocol.columns import TensorColumns, aliased_value
from verl.protocol.joins import concat_meta, continued_columns, union_meta
from verl.single_controller.ray import stored
from verl.single_controller.ray.stored import StoredColumn, StoredRows, store_rows
from verl.single_controller.ray.trimming import Lengths
from verl.types.schema import OBJECT, stored_name
from verl.utils.nested import deep_equal

__all__ = ["BatchRef"]


class BatchRef(DataProto):
    """A batch by reference. Behaves like a DataProto; `fetch()` makes one."""

    def __init__(self, columns: dict[str, StoredColumn], rows: int, meta_info: dict[str, Any]) -> None:
        self._columns, self._rows, self.meta_info = columns, rows, meta_info
        # Values on the controller, each with torch's count of writes to it when it was stored (None: it is not).
        self._held: dict[str, tuple[Any, int | None]] = {}
        self._borrowed = False

    @classmethod
    def from_stored(cls, part: StoredRows) -> BatchRef:
        """The rows that a worker stored."""
        return cls(dict(part.columns), part.rows, dict(part.meta_info))

    @classmethod
    def from_dataproto(cls, data: DataProto, lengths: Lengths | None = None) -> BatchRef:
        """Store a local batch and refer to it; its objects are stored when they are sent."""
        if isinstance(data, BatchRef):
            return data
        batch = cls.from_stored(store_rows(data.select(non_tensor_batch_keys=[]), lengths))
        batch._rows = len(data)
        for name, array in data.non_tensor_batch.items():
            batch._set_column(name, array)
        return batch

    def fetch(
        self, batch_keys: Sequence[str] | None = None, non_tensor_batch_keys: Sequence[str] | None = None
    ) -> DataProto:
        """A plain DataProto of the named columns (None: all), in memory of its own; it shares those held here."""
        tensor_names, object_names = self._chosen(batch_keys, non_tensor_batch_keys)
        values = self._read([*tensor_names, *object_names])
        td = None
        if tensor_names:
            td = TensorColumns({name: values[name] for name in tensor_names}, batch_size=[len(self)])
        return DataProto(td, {name: values[name] for name in object_names}, dict(self.meta_info))

    @property
    def lengths(self) -> Lengths | None:
        """Real prompt and response tokens of every row, known without fetching; None for batches without a mask."""
        known = [column.rows.lengths for column in self._columns.values() if column.rows.lengths is not None]
        # A batch of prompts joined with its responses knows both; the one with responses says more.
        return max(known, key=lambda lengths: lengths.widths[1], default=None)

    # ---------------------------------------------------------------- the DataProto surface

    @property
    def batch(self) -> Any:
        """The tensor columns, fetched one by one as they are named."""
        return _TensorColumns(self, self._tensor_keys)

    @batch.setter
    def batch(self, value: Any) -> None:
        self._replace(self._tensor_keys(), value)

    @property
    def non_tensor_batch(self) -> Any:
        """The object columns, fetched one by one as they are named."""
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
        """Columns are aligned by construction."""

    def get_data_info(self) -> str:
        lines = [f"BatchRef of {len(self)} rows"]
        for name in self._names():
            where = "not sent yet"
            if not self._is_ahead(name):
                where = f"{self._columns[name].type} in {len(self._columns[name].refs)} part(s)"
            lines.append(f"{name}: {where}")
        return "\n  ".join([*lines, f"meta_info: {sorted(self.meta_info)}"])

    def to(self, device: str | torch.device) -> DataProto:
        """Columns live in host memory; on another device it is a fetched DataProto."""
        return self if torch.device(device).type == "cpu" else self.fetch().to(device)

    def select(
        self,
        batch_keys: Any = None,
        non_tensor_batch_keys: Any = None,
        meta_info_keys: Any = None,
        deepcopy: bool = False,
    ) -> BatchRef:
        """The named columns (None: all of that kind). Stored columns are never written, so `deepcopy` is moot."""
        tensor_names, object_names = self._chosen(batch_keys, non_tensor_batch_keys)
        meta = self._picked(self.meta_info, meta_info_keys, "meta_info")
        return BatchRef(self._stored([*tensor_names, *object_names]), len(self), meta)

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> BatchRef:
        mapping = renaming(old_keys, new_keys, self._names(), "BatchRef.columns")
        self._columns = {mapping.get(name, name): column for name, column in self._columns.items()}
        self._held = {mapping.get(name, name): held for name, held in self._held.items()}
        return self

    def union(self, other: DataProto) -> BatchRef:
        if self._has_columns() and other._has_columns() and len(other) != len(self):
            raise ValueError(f"DataProto.union: {len(self)} rows here, {len(other)} in the other.")
        meta = union_meta(self.meta_info, other.meta_info)
        if other._has_columns():
            theirs = BatchRef.from_dataproto(other, self.lengths)
            self._drop(continued_columns(self.batch, theirs.batch))
            continued = continued_columns(theirs.batch, self.batch)
            names = [name for name in theirs._names() if name not in continued]
            new = [name for name in names if name not in self._names()]
            for name in names:
                if name not in new and not self._is_same(name, theirs):
                    raise ValueError(f"union: {name!r} differs in the two batches.")
            for name in new:
                if theirs._is_ahead(name):
                    self._hold(name, theirs._held[name][0], stored=False)
                else:
                    self._columns[name] = theirs._columns[name]
            self._rows = len(other)
        self.meta_info = meta
        return self

    # ---------------------------------------------------------------- primitives

    def _take(self, rows: slice | np.ndarray) -> BatchRef:
        count = len(range(*rows.indices(len(self)))) if isinstance(rows, slice) else len(rows)
        return BatchRef(stored.take_rows(self._stored(), rows), count, dict(self.meta_info))

    @classmethod
    def _concat(cls, parts: Sequence[DataProto]) -> BatchRef:
        batches = [cls.from_dataproto(part) for part in parts]
        meta = concat_meta([batch.meta_info for batch in batches])
        # Ranks that were given fillers only return no rows: nothing in them tells a token column from another.
        filled = [batch for batch in batches if len(batch)] or batches[:1]
        return cls(stored.concat_columns([batch._stored() for batch in filled]), sum(map(len, filled)), meta)

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"DataProto: row {row} of {len(self)}.")
        row %= len(self)
        return self._take(slice(row, row + 1)).fetch()[0]

    def _chosen(self, batch_keys: Any, non_tensor_batch_keys: Any) -> tuple[list[str], list[str]]:
        tensors, objects = self._tensor_keys(), self._object_keys()
        tensor_names = self._known(tensors if batch_keys is None else batch_keys, tensors, "batch")
        wanted = objects if non_tensor_batch_keys is None else non_tensor_batch_keys
        return tensor_names, self._known(wanted, objects, "non_tensor_batch")

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._read(self._tensor_keys()).items())

    def _names(self) -> list[str]:
        return [*self._columns, *(name for name in self._held if name not in self._columns)]

    def _tensor_keys(self) -> list[str]:
        return [name for name in self._names() if not self._is_object(name)]

    def _object_keys(self) -> list[str]:
        return [name for name in self._names() if self._is_object(name)]

    def _is_object(self, name: str) -> bool:
        if name in self._held:
            return isinstance(self._held[name][0], np.ndarray)
        return self._columns[name].type.axis == OBJECT

    def _has_columns(self) -> bool:
        return bool(self._columns or self._held)

    def _read(self, names: Sequence[str]) -> dict[str, Any]:
        """The named columns' values."""
        fetched = stored.read_columns({name: self._columns[name] for name in names if name not in self._held})
        return {name: self._held[name][0] if name in self._held else fetched[name] for name in names}

    def _get_column(self, name: str) -> Any:
        """A column for the caller to look at and, if it is a tensor, write into."""
        if name not in self._held:
            self._hold(name, self._read([name])[name], stored=True)
        return self._held[name][0]

    def _hold(self, name: str, value: Any, stored: bool) -> None:
        if isinstance(value, np.ndarray):  # a write into an array leaves no trace that we could follow
            value = value.view()
            value.flags.writeable = False
        self._held[name] = (value, _writes(value) if stored else None)

    def _set_column(self, name: str, value: torch.Tensor | np.ndarray) -> None:
        if self._has_columns() and len(value) != len(self):
            raise ValueError(f"DataProto: {name!r} has {len(value)} rows, the batch has {len(self)}.")
        DataProto.from_single_dict({name: value})  # or the error that it gives
        self._hold(name, value, stored=False)
        self._rows = len(value)

    def _is_same(self, name: str, other: BatchRef) -> bool:
        ahead = self._is_ahead(name) or other._is_ahead(name)
        if not ahead and self._columns[name].same_as(other._columns[name]):
            return True
        return deep_equal(self._read([name]), other._read([name]))

    def _is_ahead(self, name: str) -> bool:
        """Whether the column's value is held here and is not, or no longer, what the store has."""
        value, stored_writes = self._held.get(name, (None, 0))
        return stored_writes != _writes(value)

    def _replace(self, names: list[str], value: Any) -> None:
        """Put the columns of a mapping in the place of the named ones."""
        new = {} if value is None else dict(value.items())
        self._drop(names)
        for name, column in new.items():
            self._set_column(name, column)

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._columns.pop(name, None)
            self._held.pop(name, None)

    def _stored(self, names: Sequence[str] | None = None) -> dict[str, StoredColumn]:
        """The named columns (None: all) as they are now: what is held here and not in the store is put there."""
        names = self._names() if names is None else names
        for name in names:
            if self._is_ahead(name):
                value, _ = self._held[name]
                self._columns |= store_rows(DataProto.from_single_dict({name: value}), self.lengths).columns
                self._hold(name, value, stored=True)
        return {name: self._columns[name] for name in names}

    # ---------------------------------------------------------------- wire

    def __getstate__(self) -> dict[str, Any]:
        """References only, and only to the parts that the rows use."""
        return {"columns": stored.prune_parts(self._stored()), "rows": self._rows, "meta_info": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BatchRef.__init__(self, state["columns"], state["rows"], state["meta_info"])

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchRef:
        return BatchRef(self._stored(), len(self), dict(self.meta_info))


class _Columns(MutableMapping[str, Any]):
    """A BatchRef's columns of one kind as a mapping."""

    def __init__(self, owner: BatchRef, names: Callable[[], list[str]]) -> None:
        self._owner, self._names = owner, names

    def __getitem__(self, name: str) -> Any:
        stored = stored_name(name, self._names())
        if stored not in self._names():
            raise KeyError(f"BatchRef: no column {name!r}; there is {sorted(self._names())}.")
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
    """Looks like the TensorDict of a DataProto. What is not a mapping operation works on all columns, fetched."""

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([len(self._owner)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.fetch(non_tensor_batch_keys=[]).batch, name)


def _writes(value: Any) -> int:
    """How often torch has seen a tensor or its views written to."""
    return value._version if isinstance(value, torch.Tensor) else 0
