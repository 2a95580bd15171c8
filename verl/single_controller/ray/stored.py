"""Columns in the object store: what a worker leaves there, and which stored row every row of a batch is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from verl.protocol import DataProto
from verl.single_controller.ray.trimming import ColumnType, Lengths, Picks, lengths_of, padded, trimmed
from verl.types.schema import OBJECT


@dataclass
class Traffic:
    """Bytes of batch columns that this process has read from and written to the object store."""

    fetched: int = 0
    stored: int = 0


traffic = Traffic()


@dataclass(frozen=True)
class RowMap:
    """Row i of the batch is row `index[i]` of the stored parts laid end to end. Columns stored together share one."""

    part_rows: tuple[int, ...]
    index: np.ndarray
    lengths: Lengths | None
    """Real tokens of every row of the batch, where its token columns are stored without padding."""

    def take(self, rows: slice | np.ndarray) -> RowMap:
        """The map of some rows of the batch."""
        return RowMap(self.part_rows, self.index[rows], self.lengths[rows] if self.lengths is not None else None)

    def picks(self) -> tuple[list[int], Picks]:
        """The parts in use, and for each (places in the batch, rows of the part)."""
        ends = np.cumsum(self.part_rows)
        part_of = np.searchsorted(ends, self.index, side="right")
        order = np.argsort(part_of, kind="stable")
        used, first = np.unique(part_of[order], return_index=True)
        places = np.split(order, first[1:]) if len(used) else []
        starts = ends - np.asarray(self.part_rows)
        return used.tolist(), [(at, self.index[at] - starts[part]) for part, at in zip(used, places, strict=True)]

    def pruned(self) -> tuple[RowMap, list[int]]:
        """The same rows over only the parts that they use, and which those are."""
        used, picks = self.picks()
        part_rows = tuple(self.part_rows[part] for part in used)
        index = np.empty_like(self.index)
        for start, (places, chosen) in zip(np.cumsum((0, *part_rows)), picks, strict=False):
            index[places] = chosen + start
        return RowMap(part_rows, index, self.lengths), used

    @staticmethod
    def concat(maps: Sequence[RowMap]) -> RowMap:
        """The rows of all maps, over the parts of all."""
        starts = np.cumsum([0, *(sum(m.part_rows) for m in maps)])
        index = np.concatenate([m.index + start for m, start in zip(maps, starts, strict=False)])
        known = [m.lengths for m in maps if m.lengths is not None]
        lengths = Lengths.concat(known) if len(known) == len(maps) else None
        return RowMap(tuple(rows for m in maps for rows in m.part_rows), index, lengths)


@dataclass(frozen=True)
class StoredColumn:
    """A column of a batch: its stored parts, and which of their rows it has."""

    type: ColumnType
    refs: tuple[Any, ...]
    rows: RowMap

    def same_as(self, other: StoredColumn) -> bool:
        """Whether both are the same stored rows (equal values stored twice are not)."""
        return self.refs == other.refs and (
            self.rows is other.rows or np.array_equal(self.rows.index, other.rows.index)
        )


@dataclass(frozen=True)
class Bundled:
    """A column part that shares one stored object with other columns."""

    bundle: Any
    """Reference to the object, a dict of column contents by name; in a process without Ray, the dict itself."""
    name: str


@dataclass(frozen=True)
class StoredRows:
    """What a worker returns in place of a DataProto."""

    rows: int
    columns: dict[str, StoredColumn]
    meta_info: dict[str, Any]


def store_rows(data: DataProto, known: Lengths | None = None) -> StoredRows:
    """Put every column into the object store, token columns without padding.

    `known` are the lengths of the rows this was computed from: they serve where the batch carries no mask of its own.
    """
    tensors = {name: value.detach().cpu() for name, value in data.tensors()}
    lengths, widths = lengths_of(tensors) or (None, (0, 0))
    if lengths is None and known is not None and len(known) == len(data):
        lengths, widths = known, known.widths
    row_map = RowMap((len(data),), np.arange(len(data)), lengths)
    found = {name: trimmed(name, value, lengths, widths) for name, value in tensors.items()}
    found |= {name: (ColumnType(OBJECT), array) for name, array in data.non_tensor_batch.items()}
    columns = {name: StoredColumn(kind, (_put(content),), row_map) for name, (kind, content) in found.items()}
    return StoredRows(len(data), columns, data.meta_info)


def bundle_rows(data: DataProto) -> tuple[StoredRows, dict[str, Any]]:
    """The tensor columns of a batch as one dict of contents, and the description that `with_bundle` completes."""
    contents: dict[str, Any] = {}
    names = iter([name for name, _ in data.tensors()])

    def keep(content: Any) -> Bundled:
        name = next(names)
        contents[name] = content
        return Bundled(None, name)

    with stored_by(keep):
        return store_rows(data.select(non_tensor_batch_keys=[])), contents


def with_bundle(stored: StoredRows, bundle: Any) -> StoredRows:
    """The rows that `bundle_rows` described; `bundle` is the dict of contents, or a reference to it."""
    columns = {
        name: replace(column, refs=tuple(Bundled(bundle, part.name) for part in column.refs))
        for name, column in stored.columns.items()
    }
    return replace(stored, columns=columns)


def read_columns(columns: Mapping[str, StoredColumn]) -> dict[str, Any]:
    """The columns' values; all references are fetched in one go."""
    picks = {key: row_map.picks() for key, row_map in _maps(columns).items()}
    contents = iter(_contents([column.refs[part] for column in columns.values() for part in picks[id(column.rows)][0]]))
    values = {}
    for name, column in columns.items():
        used, chosen = picks[id(column.rows)]
        parts = [next(contents) for _ in used]
        values[name] = padded(column.type, parts, chosen, len(column.rows.index), column.rows.lengths)
        traffic.fetched += values[name].nbytes
    return values


def take_rows(columns: Mapping[str, StoredColumn], rows: slice | np.ndarray) -> dict[str, StoredColumn]:
    """Some rows of every column; columns that shared a map still do."""
    taken = {key: row_map.take(rows) for key, row_map in _maps(columns).items()}
    return {name: replace(column, rows=taken[id(column.rows)]) for name, column in columns.items()}


def prune_parts(columns: Mapping[str, StoredColumn]) -> dict[str, StoredColumn]:
    """The same columns without the parts that their rows do not use."""
    pruned = {key: row_map.pruned() for key, row_map in _maps(columns).items()}
    kept = {}
    for name, column in columns.items():
        row_map, used = pruned[id(column.rows)]
        kept[name] = StoredColumn(column.type, tuple(column.refs[part] for part in used), row_map)
    return kept


def concat_columns(batches: Sequence[Mapping[str, StoredColumn]]) -> dict[str, StoredColumn]:
    """The columns of batches end to end; they must have the same names and types."""
    for number, batch in enumerate(batches[1:], start=1):
        if difference := batches[0].keys() ^ batch.keys():
            raise ValueError(f"DataProto.concat: parts 0 and {number} differ in columns {sorted(difference)}.")
    maps: dict[tuple[int, ...], RowMap] = {}
    joined = {}
    for name in batches[0]:
        parts = [batch[name] for batch in batches]
        key = tuple(id(part.rows) for part in parts)
        if key not in maps:
            maps[key] = RowMap.concat([part.rows for part in parts])
        refs = tuple(ref for part in parts for ref in part.refs)
        joined[name] = StoredColumn(ColumnType.merged(name, [part.type for part in parts]), refs, maps[key])
    return joined


def _contents(parts: Sequence[Any]) -> list[Any]:
    """The contents of column parts; each reference is fetched once."""
    refs = {id(ref): ref for ref in (part.bundle if isinstance(part, Bundled) else part for part in parts)}
    remote = {key: ref for key, ref in refs.items() if not isinstance(ref, dict)}
    fetched = dict(zip(remote, ray.get(list(remote.values())), strict=True)) if remote else {}
    return [
        fetched.get(id(part.bundle), part.bundle)[part.name] if isinstance(part, Bundled) else fetched[id(part)]
        for part in parts
    ]


def _maps(columns: Mapping[str, StoredColumn]) -> dict[int, RowMap]:
    return {id(column.rows): column.rows for column in columns.values()}


def placed(stored: StoredRows, refs: Sequence[Any]) -> StoredRows:
    """With references in the place of their numbers (see `stored_by`)."""
    columns = {name: replace(column, refs=(refs[column.refs[0]],)) for name, column in stored.columns.items()}
    return replace(stored, columns=columns)


@contextmanager
def stored_by(keep: Callable[[Any], Any]) -> Iterator[None]:
    """What this thread stores goes to `keep`, which gives what stands for it, instead of into Ray's store."""
    token = _keep.set(keep)
    try:
        yield
    finally:
        _keep.reset(token)


_keep: ContextVar[Callable[[Any], Any]] = ContextVar("verl_keep_columns", default=ray.put)


def _put(content: Any) -> Any:
    arrays = content if isinstance(content, tuple) else (content,)
    traffic.stored += sum(array.nbytes for array in arrays)
    return _keep.get()(content)
