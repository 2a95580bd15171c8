"""Metrics as JSON lines in a folder, safe against a crash at any moment."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.disk import atomic_write
from verl.utils.tracking.tracker import Generation, Run, Tracker


class JsonFiles(Tracker):
    """`metrics.jsonl` (one object per step), `generations.jsonl` (one per sample) and `config.json`.

    Records are appended, whole, and handed to the system at once, so a killed run keeps every step. A run that says
    its `first_step` goes on below the steps before it: records of steps that it does again (or of another run of that
    name) move to `<name>.superseded.jsonl`, and what is logged for the last step before it joins that step's.
    NaN and infinities, which JSON lacks, are the strings "nan", "inf", "-inf": `float(value)` reads all.
    """

    def __init__(self, run: Run) -> None:
        directory, first_step = run.directory, run.first_step
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(_json(run.config, indent=2) + "\n", encoding="utf-8")
        self._metrics = _JsonLines(directory / "metrics.jsonl")
        self._generations = _JsonLines(directory / "generations.jsonl")
        if first_step is not None:
            self._metrics.supersede(first_step)
            self._generations.supersede(first_step)
        self._before = None if first_step is None else first_step - 1

    def log(self, data: Mapping[str, Any], step: int) -> None:
        record = {"step": step, "time": round(time.time(), 3), "data": dict(data)}
        if step == self._before and self._metrics.join_last(record):
            return
        self._metrics.append([record])

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        self._generations.append([{"step": step, **sample._asdict()} for sample in samples])

    def close(self) -> None:
        self._metrics.close()
        self._generations.close()

    @classmethod
    def folder(cls, run: Run) -> Path | None:
        return run.directory


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

    def supersede(self, first_step: int) -> None:
        """Move the records of this step and later ones, and what is no record, out of the way."""
        if not self._path.is_file():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (step := _step_of(line)) is not None and step < first_step]
        if len(kept) < len(lines):
            old = self._path.with_name(f"{self._path.stem}.superseded{self._path.suffix}")
            with old.open("ab") as file:
                file.writelines(line.rstrip(b"\n") + b"\n" for line in lines if line not in kept)
            self._rewrite(kept)

    def join_last(self, record: Mapping[str, Any]) -> bool:
        """Add to the last record where it is of the same step; says whether it is."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.is_file() else []
        if not lines or _step_of(lines[-1]) != record["step"]:
            return False
        last = json.loads(lines[-1])
        last["data"] |= record["data"]
        self.close()
        self._rewrite([*lines[:-1], (_json(last) + "\n").encode()])
        return True

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        with atomic_write(self._path) as stream:
            stream.writelines(lines)

    def _end_torn_line(self) -> None:
        """A run that died inside a write left a line without its end; keep it from swallowing the next record."""
        with self._path.open("rb") as file:
            if file.seek(0, 2) and file.seek(-1, 2) is not None and file.read(1) != b"\n":
                self._file.write(b"\n")


def _step_of(line: bytes) -> int | None:
    """The step of a record; None of a line that was torn."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


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
