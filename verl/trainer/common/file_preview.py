"""Read the first rows of data files, for quick checks, with limits on rows and bytes over all files of a key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.dataset.rows import ArrowFile, DataFile, JsonFile, arrow_errors, is_json_array, json_object, read_arrow

# Limit for the first line of a file, which is read even if it exceeds the file's share of the budget.
_MAX_FIRST_LINE = 1024**2
_CHUNK = 1024**2


@dataclass
class ReadBudget:
    """Limits for reading `files` more files. Every file gets an equal share; unused parts are left to the next ones."""

    files: int
    rows: int = 20_000
    size: int = 8 * 1024**2
    """Bytes to parse."""
    counted: int = 128 * 1024**2
    """Bytes of JSON files to read only for counting their lines."""

    def next_share(self) -> ReadBudget:
        """Return the limits for the next file. Pass the amounts actually read to `spend`."""
        files = max(1, self.files)
        self.files -= 1
        rows, size = max(1, self.rows // files), max(1, self.size // files)
        return replace(self, files=1, rows=rows, size=size, counted=self.counted // files)

    def spend(self, rows: int, size: int, counted: int = 0) -> None:
        """Subtract the amounts read from the limits."""
        self.rows, self.size, self.counted = self.rows - rows, self.size - size, self.counted - counted


@dataclass(frozen=True)
class FilePreview:
    """The first rows of a file, or all rows of a small file."""

    rows: DataFile
    row_count: int | None
    """Upper bound for the number of rows of the whole file; None: unknown without reading the file."""


class ParsedRows:
    """A `DataFile` with parsed rows in memory."""

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


def read_preview(file: str, budget: ReadBudget) -> FilePreview | None:
    """Return the first rows of a file; None for a JSON array larger than its share of the budget, since an array can
    only be parsed as a whole. Raises the errors of `open_data_file`."""
    size, share = os.path.getsize(file), budget.next_share()
    if size == 0:
        raise ValueError(f"{file}: the file is empty (0 bytes). Write it again, or leave it out.")
    if file.endswith((".parquet", ".arrow")):
        return _preview_arrow(file, share, budget)
    if not is_json_array(file):
        return _preview_lines(file, size, share, budget)
    if size > share.size:
        return None
    whole = JsonFile(file)
    budget.spend(len(whole), size)
    places = [whole.where(row) for row in range(len(whole))]
    return FilePreview(ParsedRows(file, whole.rows(0, len(whole)), places), len(whole))


def _preview_arrow(file: str, share: ReadBudget, budget: ReadBudget) -> FilePreview:
    with arrow_errors(file):
        if file.endswith(".arrow"):
            table = read_arrow(file)  # mapped: nothing is read yet
            rows, size = table.num_rows, table.nbytes
            table = table.slice(0, _row_limit(rows, size, share))
        else:
            # Mapped: only the pages of the first rows are read, not whole row groups.
            source = pq.ParquetFile(file, memory_map=True)
            groups = [source.metadata.row_group(number) for number in range(source.num_row_groups)]
            rows, size = source.metadata.num_rows, sum(group.total_byte_size for group in groups)
            table = _first_rows(source, _row_limit(rows, size, share))
    budget.spend(table.num_rows, size * table.num_rows // max(1, rows))
    return FilePreview(ArrowFile(file, table), rows)


def _row_limit(rows: int, size: int, share: ReadBudget) -> int:
    """Return how many of a file's `rows` rows, which take `size` bytes, fit into the share; at least one."""
    return min(rows, share.rows, max(1, share.size * rows // max(1, size)))


def _first_rows(source: pq.ParquetFile, count: int) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    if count:
        for batch in source.iter_batches(count):
            batches.append(batch)
            if sum(part.num_rows for part in batches) >= count:
                break
    return pa.Table.from_batches(batches, source.schema_arrow).slice(0, count)


def _preview_lines(file: str, size: int, share: ReadBudget, budget: ReadBudget) -> FilePreview | None:
    """Return the first rows of a JSONL file of `size` bytes; None if its first line exceeds the limits."""
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    number = position = 0
    with open(file, "rb") as lines:
        while position < size and len(rows) < share.rows:
            limit = share.size - position if number else max(share.size, _MAX_FIRST_LINE)
            line = lines.readline(limit) if limit > 0 else b""
            if not line.endswith(b"\n") and position + len(line) < size:  # truncated by the limit
                break
            number, position = number + 1, position + len(line)
            if line.strip():
                places.append(f"{file} line {number}")
                rows.append(json_object(line, places[-1]))
    if position >= size:
        budget.spend(len(rows), position)
        return FilePreview(ParsedRows(file, rows, places), len(rows))
    can_count = size <= share.counted
    budget.spend(len(rows), position, size if can_count else 0)
    return FilePreview(ParsedRows(file, rows, places), _line_count(file) if can_count else None) if rows else None


def _line_count(file: str) -> int:
    count, last = 0, b"\n"
    with open(file, "rb") as content:
        while chunk := content.read(_CHUNK):
            count, last = count + chunk.count(b"\n"), chunk[-1:]
    return count + (last != b"\n")
