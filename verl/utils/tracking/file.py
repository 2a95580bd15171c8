"""Metrics as JSON lines in a folder, safe against a crash at any moment."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.tracking.backends import Sample


class FileBackend:
    """`metrics.jsonl` (one object per step), `generations.jsonl` (one per sample) and `config.json`.

    Records are appended, whole, and handed to the system at once, so a killed run keeps every step and a resumed one
    goes on below. NaN and infinities, which JSON lacks, are the strings "nan", "inf", "-inf": `float(value)` reads all.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(_json(config, indent=2) + "\n", encoding="utf-8")
        self._metrics = _JsonLines(directory / "metrics.jsonl")
        self._generations = _JsonLines(directory / "generations.jsonl")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._metrics.append([{"step": step, "time": round(time.time(), 3), "data": dict(data)}])

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        self._generations.append([{"step": step, **sample._asdict()} for sample in samples])

    def close(self) -> None:
        self._metrics.close()
        self._generations.close()


class _JsonLines:
    """Appends objects to a file that is created with the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._file is None:
            # Unbuffered: one record is one write.
            self._file = self._path.open("ab", buffering=0)
            self._end_torn_line()
        for row in rows:
            self._file.write((_json(row) + "\n").encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_torn_line(self) -> None:
        """A run that died inside a write left a line without its end; keep it from swallowing the next record."""
        with self._path.open("rb") as file:
            if file.seek(0, 2) and file.seek(-1, 2) is not None and file.read(1) != b"\n":
                self._file.write(b"\n")


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_strict(value), ensure_ascii=False, allow_nan=False, default=str, indent=indent)


def _strict(value: Any) -> Any:
    """The value with non-finite floats as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    return value
