"""The first rows of data files, for quick checks with a limit on the bytes read of all files of a key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.dataset.rows import ArrowPart, JsonPart, Part, arrow_errors, is_json_array, json_object, read_arrow

# The first line of a file is read up to this size, even if it exceeds the file's share of the limit.
_MIN_BYTES = 1024**2
_CHUNK = 1024**2


@dataclass
class Budget:
    """What may still be read of `files` files; each takes an equal share, and leaves what it does not need."""

    files: int
    rows: int = 20_000
    size: int = 8 * 1024**2
    counted: int = 128 * 1024**2
    """Bytes of JSON files that are read only to count their lines."""

    def next_share(self) -> Budget:
        """The share of the next file, of which `spend` takes what was read."""
        files = max(1, self.files)
        self.files -= 1
        rows, size = max(1, self.rows // files), max(1, self.size // files)
        return replace(self, files=1, rows=rows, size=size, counted=self.counted // files)

    def spend(self, rows: int, size: int, counted: int = 0) -> None:
        self.rows, self.size, self.counted = self.rows - rows, self.size - size, self.counted - counted


@dataclass(frozen=True)
class Head:
    """The first rows of a file, or all rows of a small one."""

    part: Part
    rows: int | None
    """Rows of the whole file, at most; None: not known without reading it."""


class MemoryPart:
    """Rows that are already parsed."""

    def __init__(self, file: str, rows: Sequence[dict[str, Any]], places: Sequence[str]) -> None:
        self.file, self._rows, self._places = file, rows, places
        self.columns = list(dict.fromkeys(name for row in rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, start: int, stop: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        rows = list(self._rows[start:stop])
        return rows if columns is None else [{name: row[name] for name in columns if name in row} for row in rows]

    def where(self, row: int) -> str:
        return self._places[row]


def open_head(file: str, budget: Budget) -> Head | None:
    """The beginning of a file; None for a JSON array above its share of the budget, which can only be read whole.

    Raises the errors of `open_part`.
    """
    size, share = os.path.getsize(file), budget.next_share()
    if size == 0:
        raise ValueError(f"{file}: the file is empty (0 bytes). Write it again, or leave it out.")
    if file.endswith((".parquet", ".arrow")):
        return _arrow_head(file, share, budget)
    if not is_json_array(file):
        return _lines_head(file, size, share, budget)
    if size > share.size:
        return None
    whole = JsonPart(file)
    budget.spend(len(whole), size)
    places = [whole.where(row) for row in range(len(whole))]
    return Head(MemoryPart(file, whole.rows(0, len(whole)), places), len(whole))


def _arrow_head(file: str, share: Budget, budget: Budget) -> Head:
    with arrow_errors(file):
        if file.endswith(".arrow"):
            table = read_arrow(file)  # mapped: nothing is read yet
            rows, size = table.num_rows, table.nbytes
            table = table.slice(0, _affordable(rows, size, share))
        else:
            # Mapped: only the pages of the first rows are read, not whole row groups.
            source = pq.ParquetFile(file, memory_map=True)
            groups = [source.metadata.row_group(number) for number in range(source.num_row_groups)]
            rows, size = source.metadata.num_rows, sum(group.total_byte_size for group in groups)
            table = _first_rows(source, _affordable(rows, size, share))
    budget.spend(table.num_rows, size * table.num_rows // max(1, rows))
    return Head(ArrowPart(file, table), rows)


def _affordable(rows: int, size: int, share: Budget) -> int:
    """How many of `rows` rows that take `size` bytes together fit into the share; at least one."""
    return min(rows, share.rows, max(1, share.size * rows // max(1, size)))


def _first_rows(source: pq.ParquetFile, count: int) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    if count:
        for batch in source.iter_batches(count):
            batches.append(batch)
            if sum(each.num_rows for each in batches) >= count:
                break
    return pa.Table.from_batches(batches, source.schema_arrow).slice(0, count)


def _lines_head(file: str, size: int, share: Budget, budget: Budget) -> Head | None:
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    number = position = 0
    with open(file, "rb") as lines:
        while position < size and len(rows) < share.rows:
            limit = share.size - position if number else max(share.size, _MIN_BYTES)
            line = lines.readline(limit) if limit > 0 else b""
            if not line.endswith(b"\n") and position + len(line) < size:  # cut off by the limit
                break
            number, position = number + 1, position + len(line)
            if line.strip():
                places.append(f"{file} line {number}")
                rows.append(json_object(line, places[-1]))
    if position >= size:
        budget.spend(len(rows), position)
        return Head(MemoryPart(file, rows, places), len(rows))
    counts = size <= share.counted
    budget.spend(len(rows), position, size if counts else 0)
    return Head(MemoryPart(file, rows, places), _line_count(file) if counts else None) if rows else None


def _line_count(file: str) -> int:
    count, last = 0, b"\n"
    with open(file, "rb") as content:
        while chunk := content.read(_CHUNK):
            count, last = count + chunk.count(b"\n"), chunk[-1:]
    return count + (last != b"\n")
