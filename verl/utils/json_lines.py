"""JSON lines: files to which records are appended; a killed process loses at most its last record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.disk import atomic_write

__all__ = ["JsonLines", "to_json"]


class JsonLines:
    """Appends objects to a file that is created with the first one. Each call of `append` is one unbuffered write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def append(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Append one line per object; return the number of bytes."""
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            self._terminate_last_line()
        content = "".join(to_json(row) + "\n" for row in rows).encode()
        self._file.write(content)
        return len(content)

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def supersede(self, first_step: int) -> None:
        """Move records of this step and later ones, and lines that are no records, to the superseded file."""
        if not self._path.is_file():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (step := _step_of(line)) is not None and step < first_step]
        if len(kept) < len(lines):
            old = self._path.with_name(f"{self._path.stem}.superseded{self._path.suffix}")
            with old.open("ab") as file:
                file.writelines(line.rstrip(b"\n") + b"\n" for line in lines if line not in kept)
            self._rewrite(kept)

    def merge_into_last(self, record: Mapping[str, Any]) -> bool:
        """Add the data to the last record if that is of the same step; return whether it is."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.is_file() else []
        if not lines or _step_of(lines[-1]) != record["step"]:
            return False
        last = json.loads(lines[-1])
        last["data"] |= record["data"]
        self.close()
        self._rewrite([*lines[:-1], (to_json(last) + "\n").encode()])
        return True

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        with atomic_write(self._path) as stream:
            stream.writelines(lines)

    def _terminate_last_line(self) -> None:
        """Terminate an incomplete last line of a killed run: otherwise the next record would continue it."""
        with self._path.open("rb") as file:
            if file.seek(0, 2) and file.seek(-1, 2) is not None and file.read(1) != b"\n":
                self._file.write(b"\n")


def to_json(value: Any, indent: int | None = None, default: Callable[[Any], Any] = str) -> str:
    """Return strict JSON: NaN and infinities, which JSON lacks, are the strings "nan", "inf" and "-inf".

    `default` converts values of other types.
    """
    return json.dumps(_to_json_value(value), ensure_ascii=False, allow_nan=False, default=default, indent=indent)


def _to_json_value(value: Any) -> Any:
    """The value with non-finite floats as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(entry) for entry in value]
    return value


def _step_of(line: bytes) -> int | None:
    """The step of a record; None for an incomplete line."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
