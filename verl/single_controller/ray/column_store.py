"""Columns in the object store: token columns without padding, and which stored rows the rows of a batch are.

With P and R the padded prompt and response widths, the real tokens of row i are the window
[P - prompt_i, P + response_i) of a sequence column [rows, P + R], and the matching parts of a prompt column [rows, P]
(left-padded) and a response column [rows, R] (right-padded). Only the windows are stored, concatenated, with their
offsets; reading pads to the longest row that is read. `verl.types.schema` defines the axis and the padding value of
each column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch

from verl.protocol import DataProto
from verl.types.schema import COLUMNS, OBJECT, PROMPT, RESPONSE, ROW, SEQUENCE, Axis, filler

Picks = list[tuple[np.ndarray, np.ndarray]]
"""For each stored part: (row indices in the result, row indices in the part)."""


@dataclass(frozen=True)
class Lengths:
    """Numbers of prompt and response tokens of every row, without padding: int64 [rows] each."""

    prompt: np.ndarray
    response: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt)

    def __getitem__(self, rows: slice | np.ndarray) -> Lengths:
        return Lengths(self.prompt[rows], self.response[rows])

    @property
    def widths(self) -> tuple[int, int]:
        """(P, R): the largest prompt and response lengths."""
        return int(self.prompt.max(initial=0)), int(self.response.max(initial=0))

    @staticmethod
    def concat(parts: Sequence[Lengths]) -> Lengths:
        """The lengths of all parts."""
        return Lengths(np.concatenate([p.prompt for p in parts]), np.concatenate([p.response for p in parts]))

    def windows(self, axis: Axis, prompt_width: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of every row's real tokens in a column of this axis, with prompts padded to `prompt_width`."""
        if axis == RESPONSE:
            return np.zeros_like(self.response), self.response
        start = prompt_width - self.prompt
        return start, start + self.prompt + (self.response if axis == SEQUENCE else 0)


@dataclass(frozen=True)
class ColumnType:
    """Axis, dtype and shape of a column; the same for all its stored parts, except for `pad`."""

    axis: Axis
    dtype: str = ""
    inner: tuple[int, ...] = ()
    """Shape of one token, or of one row if there is no token axis."""
    pad: float | None = None
    """Padding value; None: unknown, because no row of the part has padding."""

    @staticmethod
    def merged(name: str, types: Sequence[ColumnType]) -> ColumnType:
        """The common type of the parts of a column. Raises ValueError if they differ."""
        shapes = {replace(column_type, pad=None) for column_type in types}
        if len(shapes) > 1:
            differing = " and ".join(sorted(map(str, shapes)))
            raise ValueError(
                f"DataProto.concat: {name!r} differs between parts: {differing}."
                " (A column with one value per token is stored without padding only if its padding has a single value.)"
            )
        return next((column_type for column_type in types if column_type.pad is not None), types[0])

    def __str__(self) -> str:
        return f"{self.axis} {self.dtype} {list(self.inner)}"


@dataclass
class Traffic:
    """Bytes of batch columns that this process has read from and written to the object store."""

    fetched: int = 0
    stored: int = 0


traffic = Traffic()


@dataclass(frozen=True)
class RowMap:
    """Row i of the batch is row `index[i]` of the concatenated stored parts. Columns stored together share a RowMap."""

    part_rows: tuple[int, ...]
    index: np.ndarray
    lengths: Lengths | None
    """Lengths of the rows of the batch, if its token columns are stored without padding."""

    def take(self, rows: slice | np.ndarray) -> RowMap:
        """The map of these rows of the batch."""
        return RowMap(self.part_rows, self.index[rows], self.lengths[rows] if self.lengths is not None else None)

    def picks(self) -> tuple[list[int], Picks]:
        """The parts in use, and for each (row indices in the batch, row indices in the part)."""
        ends = np.cumsum(self.part_rows)
        part_of = np.searchsorted(ends, self.index, side="right")
        order = np.argsort(part_of, kind="stable")
        used, first = np.unique(part_of[order], return_index=True)
        targets = np.split(order, first[1:]) if len(used) else []
        starts = ends - np.asarray(self.part_rows)
        picks = [(rows, self.index[rows] - starts[part]) for part, rows in zip(used, targets, strict=True)]
        return used.tolist(), picks

    def pruned(self) -> tuple[RowMap, list[int]]:
        """The same rows over only the parts in use, and the numbers of those parts."""
        used, picks = self.picks()
        part_rows = tuple(self.part_rows[part] for part in used)
        index = np.empty_like(self.index)
        for start, (targets, sources) in zip(np.cumsum((0, *part_rows)), picks, strict=False):
            index[targets] = sources + start
        return RowMap(part_rows, index, self.lengths), used

    @staticmethod
    def concat(maps: Sequence[RowMap]) -> RowMap:
        """The rows of all maps, over the concatenated parts of all maps."""
        starts = np.cumsum([0, *(sum(m.part_rows) for m in maps)])
        index = np.concatenate([m.index + start for m, start in zip(maps, starts, strict=False)])
        known = [m.lengths for m in maps if m.lengths is not None]
        lengths = Lengths.concat(known) if len(known) == len(maps) else None
        return RowMap(tuple(rows for m in maps for rows in m.part_rows), index, lengths)


@dataclass(frozen=True)
class StoredColumn:
    """A column of a batch: references to its stored parts, and which of their rows the batch has."""

    type: ColumnType
    refs: tuple[Any, ...]
    rows: RowMap

    def same_as(self, other: StoredColumn) -> bool:
        """Whether both refer to the same stored rows (equal values that were stored twice do not)."""
        return self.refs == other.refs and (
            self.rows is other.rows or np.array_equal(self.rows.index, other.rows.index)
        )


@dataclass(frozen=True)
class BundledColumn:
    """A column part that shares one stored object with other columns."""

    bundle: Any
    """Reference to the object, a dict of column contents by name; in a process without Ray, the dict itself."""
    name: str


@dataclass(frozen=True)
class StoredRows:
    """A batch in the object store: what a worker returns instead of a DataProto."""

    rows: int
    columns: dict[str, StoredColumn]
    meta_info: dict[str, Any]


def store_rows(data: DataProto, known: Lengths | None = None) -> StoredRows:
    """Put every column into the object store, token columns without padding.

    `known`: lengths of the rows that the batch was computed from, used if the batch has no attention mask.
    """
    tensors = {name: value.detach().cpu() for name, value in data.tensors()}
    lengths, widths = lengths_of(tensors) or (None, (0, 0))
    if "attention_mask" not in tensors and known is not None and len(known) == len(data):
        lengths, widths = known, known.widths
    row_map = RowMap((len(data),), np.arange(len(data)), lengths)
    contents = {name: trim(name, value, lengths, widths) for name, value in tensors.items()}
    contents |= {name: (ColumnType(OBJECT), array) for name, array in data.non_tensor_batch.items()}
    columns = {name: StoredColumn(kind, (_put(content),), row_map) for name, (kind, content) in contents.items()}
    return StoredRows(len(data), columns, data.meta_info)


def bundle_rows(data: DataProto) -> tuple[StoredRows, dict[str, Any]]:
    """The tensor columns of a batch as one dict of contents, and a description for `attach_bundle`."""
    contents: dict[str, Any] = {}
    names = iter([name for name, _ in data.tensors()])

    def add_to_bundle(content: Any) -> BundledColumn:
        name = next(names)
        contents[name] = content
        return BundledColumn(None, name)

    with store_with(add_to_bundle):
        return store_rows(data.select(non_tensor_batch_keys=[])), contents


def attach_bundle(stored: StoredRows, bundle: Any) -> StoredRows:
    """Complete the description of `bundle_rows`; `bundle`: the dict of contents, or a reference to it."""
    columns = {
        name: replace(column, refs=tuple(BundledColumn(bundle, part.name) for part in column.refs))
        for name, column in stored.columns.items()
    }
    return replace(stored, columns=columns)


def read_columns(columns: Mapping[str, StoredColumn]) -> dict[str, Any]:
    """The values of the columns; all references are fetched by one call."""
    picks = {key: row_map.picks() for key, row_map in _maps(columns).items()}
    contents = iter(_contents([column.refs[part] for column in columns.values() for part in picks[id(column.rows)][0]]))
    values = {}
    for name, column in columns.items():
        used, column_picks = picks[id(column.rows)]
        parts = [next(contents) for _ in used]
        values[name] = gather(column.type, parts, column_picks, len(column.rows.index), column.rows.lengths)
        traffic.fetched += values[name].nbytes
    return values


def take_rows(columns: Mapping[str, StoredColumn], rows: slice | np.ndarray) -> dict[str, StoredColumn]:
    """These rows of every column. Columns with a common RowMap still share one."""
    taken = {key: row_map.take(rows) for key, row_map in _maps(columns).items()}
    return {name: replace(column, rows=taken[id(column.rows)]) for name, column in columns.items()}


def prune_parts(columns: Mapping[str, StoredColumn]) -> dict[str, StoredColumn]:
    """The same columns without references to unused parts."""
    pruned = {key: row_map.pruned() for key, row_map in _maps(columns).items()}
    kept = {}
    for name, column in columns.items():
        row_map, used = pruned[id(column.rows)]
        kept[name] = StoredColumn(column.type, tuple(column.refs[part] for part in used), row_map)
    return kept


def concat_columns(batches: Sequence[Mapping[str, StoredColumn]]) -> dict[str, StoredColumn]:
    """Concatenate the columns of batches, which must have the same names and types."""
    for number, batch in enumerate(batches[1:], start=1):
        if difference := batches[0].keys() ^ batch.keys():
            raise ValueError(f"DataProto.concat: parts 0 and {number} differ in columns {sorted(difference)}.")
    maps: dict[tuple[int, ...], RowMap] = {}
    columns = {}
    for name in batches[0]:
        parts = [batch[name] for batch in batches]
        key = tuple(id(part.rows) for part in parts)
        if key not in maps:
            maps[key] = RowMap.concat([part.rows for part in parts])
        refs = tuple(ref for part in parts for ref in part.refs)
        columns[name] = StoredColumn(ColumnType.merged(name, [part.type for part in parts]), refs, maps[key])
    return columns


def _contents(parts: Sequence[Any]) -> list[Any]:
    """The contents of column parts; each reference is fetched once."""
    refs = {id(ref): ref for ref in (part.bundle if isinstance(part, BundledColumn) else part for part in parts)}
    remote = {key: ref for key, ref in refs.items() if not isinstance(ref, dict)}
    try:
        fetched = dict(zip(remote, ray.get(list(remote.values())), strict=True)) if remote else {}
    except ray.exceptions.OwnerDiedError as error:
        address = re.search(r"owner address: ([^\s:]+)", str(error))
        host = f" on {address[1]}" if address else ""
        raise RuntimeError(f"rows of a batch are lost: the process{host} that stored them has ended") from error
    return [
        fetched.get(id(part.bundle), part.bundle)[part.name] if isinstance(part, BundledColumn) else fetched[id(part)]
        for part in parts
    ]


def _maps(columns: Mapping[str, StoredColumn]) -> dict[int, RowMap]:
    return {id(column.rows): column.rows for column in columns.values()}


def resolve_refs(stored: StoredRows, refs: Sequence[Any]) -> StoredRows:
    """Replace column numbers (see `RayRankHost.call_streamed`) by references."""
    columns = {name: replace(column, refs=(refs[column.refs[0]],)) for name, column in stored.columns.items()}
    return replace(stored, columns=columns)


@contextmanager
def store_with(put: Callable[[Any], Any]) -> Iterator[None]:
    """In this context, columns are stored by `put`, which returns their references, instead of `ray.put`."""
    token = _put_column.set(put)
    try:
        yield
    finally:
        _put_column.reset(token)


_put_column: ContextVar[Callable[[Any], Any]] = ContextVar("verl_put_column", default=ray.put)


def _put(content: Any) -> Any:
    arrays = content if isinstance(content, tuple) else (content,)
    traffic.stored += sum(array.nbytes for array in arrays)
    return _put_column.get()(content)


def lengths_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Lengths, tuple[int, int]] | None:
    """Lengths and padded widths (P, R), from `attention_mask` and `responses`.

    None if there is no mask of shape [rows, P + R], or if prompts are not left-padded or responses not right-padded.
    """
    mask = tensors.get("attention_mask")
    if mask is None or mask.ndim != 2 or mask.shape[0] == 0:
        return None
    response_width = tensors["responses"].shape[1] if "responses" in tensors else 0
    prompt_width = mask.shape[1] - response_width
    if prompt_width < 0:
        return None
    real = mask != 0
    prompt, response = real[:, :prompt_width], real[:, prompt_width:]
    left_padded = bool((prompt[:, 1:] >= prompt[:, :-1]).all())
    right_padded = bool((response[:, 1:] <= response[:, :-1]).all())
    if not (left_padded and right_padded):
        return None
    return Lengths(prompt.sum(1).numpy(), response.sum(1).numpy()), (prompt_width, response_width)


def trim(name: str, value: torch.Tensor, lengths: Lengths | None, widths: tuple[int, int]) -> tuple[ColumnType, Any]:
    """Return the type of a column and the content to store: an array, or (values, offsets) for a token column.

    `values` are the real tokens of all rows, concatenated.
    """
    array, dtype = as_numpy(value), str(value.dtype).removeprefix("torch.")
    axis = _axis_of(name, value, widths)
    if lengths is not None and axis != ROW:
        starts, ends = lengths.windows(axis, widths[0])
        pad = _padding_value(value, starts, ends) if filler(name) is None else filler(name)
        # A user column with other values in the padding may not be a token column.
        if name in COLUMNS or _has_only_padding_outside(value, starts, ends, pad):
            offsets = np.concatenate([[0], np.cumsum(ends - starts)])
            values = np.empty((int(offsets[-1]), *array.shape[2:]), dtype=array.dtype)
            for row, start, end, offset in zip(array, starts.tolist(), ends.tolist(), offsets.tolist(), strict=False):
                values[offset : offset + end - start] = row[start:end]
            return ColumnType(axis, dtype, tuple(value.shape[2:]), pad), (values, offsets)
    return ColumnType(ROW, dtype, tuple(value.shape[1:])), np.ascontiguousarray(array)


def gather(column: ColumnType, parts: list[Any], picks: Picks, rows: int, lengths: Lengths | None) -> Any:
    """Copy rows from the parts of a column into a new tensor or array; token columns are padded."""
    if column.axis == OBJECT:
        inner = parts[0].shape[1:] if parts else ()
        result = target = np.empty((rows, *inner), dtype=np.result_type(*parts) if parts else object)
    elif column.axis == ROW:
        result = torch.empty((rows, *column.inner), dtype=getattr(torch, column.dtype))
        target = as_numpy(result)
    else:
        assert lengths is not None, "a token column is stored with its lengths"
        return _gather_tokens(column, parts, picks, lengths)
    for part, (targets, sources) in zip(parts, picks, strict=True):
        target[targets] = part[sources]
    return result


def _gather_tokens(column: ColumnType, parts: list[Any], picks: Picks, lengths: Lengths) -> torch.Tensor:
    """Token rows, padded to the longest prompt and response among them."""
    prompt_width, response_width = lengths.widths
    width = _widths(prompt_width, response_width)[column.axis]
    dtype = getattr(torch, column.dtype)
    result = torch.full((len(lengths), width, *column.inner), column.pad or 0, dtype=dtype)
    target = as_numpy(result)
    starts, ends = lengths.windows(column.axis, prompt_width)
    for (values, offsets), (targets, sources) in zip(parts, picks, strict=True):
        spans = (targets, starts[targets], ends[targets], offsets[sources])
        for row, start, end, offset in zip(*(span.tolist() for span in spans), strict=True):
            target[row, start:end] = values[offset : offset + end - start]
    return result


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as an array; dtypes that numpy lacks (bfloat16, float8) as integers of the same size."""
    tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()]).numpy()


def _widths(prompt: int, response: int) -> dict[Axis, int]:
    return {PROMPT: prompt, RESPONSE: response, SEQUENCE: prompt + response}


def _axis_of(name: str, value: torch.Tensor, widths: tuple[int, int]) -> Axis:
    """The axis that a tensor is padded along: from the schema, or for user columns by their width. ROW: no padding."""
    if value.ndim < 2:
        return ROW
    axes: tuple[Axis, ...] = (COLUMNS[name].axis,) if name in COLUMNS else (SEQUENCE, RESPONSE)
    return next((axis for axis in axes if _widths(*widths).get(axis) == value.shape[1]), ROW)


def _padding_value(value: torch.Tensor, starts: np.ndarray, ends: np.ndarray) -> float | None:
    """The first value in the padding; None if no row has padding."""
    left, right = np.flatnonzero(starts > 0), np.flatnonzero(ends < value.shape[1])
    if not len(left) and not len(right):
        return None
    cell = value[int(left[0]), 0] if len(left) else value[int(right[0]), -1]
    return cell.reshape(-1)[0].item() if cell.numel() else None


def _has_only_padding_outside(value: torch.Tensor, starts: np.ndarray, ends: np.ndarray, pad: float | None) -> bool:
    positions = torch.arange(value.shape[1])
    outside = (positions < torch.from_numpy(starts)[:, None]) | (positions >= torch.from_numpy(ends)[:, None])
    return pad is None or bool((value[outside] == pad).all())
