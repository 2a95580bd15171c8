"""AnswerStore: answers on disk, batch by batch, each whole or not there; a later run finds what an earlier one kept.

While answers are missing they lie in a folder beside the output file, with the settings that decide them. The output
file is written when all are there, and carries the same settings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from verl.utils.disk import atomic_write

__all__ = ["RESPONSES", "AnswerStore"]

RESPONSES = "responses"
_SETTINGS = b"verl.generation"
_ANSWERS = pa.list_(pa.string())


class AnswerStore:
    """The answers to `batches` batches of prompts, on their way into `output`. One run at a time, as a context."""

    def __init__(self, output: Path, settings: Mapping[str, Any], batches: int) -> None:
        self.output = output
        self.folder = output.with_name(f"{output.name}.parts")
        # As they are read back.
        self._settings = json.loads(json.dumps(settings, sort_keys=True, default=str))
        self._batches = batches
        self._lock = FileLock(output.with_name(f".{output.name}.lock"))

    def __enter__(self) -> AnswerStore:
        """Find what is there; a ValueError where it is not of this run."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"data.output_path: another run is writing {self.output}. Wait, or choose another."
            ) from error
        try:
            self._check_settings()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # In this order: whoever comes in between finds a lock file of his own, and nobody's work left to do.
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    @property
    def finished(self) -> bool:
        """The output file is there."""
        return self.output.exists()

    def missing(self) -> list[int]:
        """Numbers of the batches that are still to be answered."""
        return [number for number in range(self._batches) if not self._part(number).exists()]

    def keep(self, number: int, answers: Sequence[Sequence[str]]) -> None:
        """The answers to each prompt of a batch; when this returns they are on disk."""
        _write(pa.table({RESPONSES: pa.array(answers, _ANSWERS)}), self._part(number))

    def finish(self, rows: pa.Table) -> None:
        """Write `rows` with their answers, all at once, and remove the folder."""
        parts = [pq.read_table(self._part(number)).column(RESPONSES) for number in range(self._batches)]
        answers = pa.chunked_array([chunk for part in parts for chunk in part.chunks], _ANSWERS)
        whole = rows.append_column(RESPONSES, answers)
        known = {**(whole.schema.metadata or {}), _SETTINGS: json.dumps(self._settings).encode()}
        _write(whole.replace_schema_metadata(known), self.output)
        shutil.rmtree(self.folder)

    def _check_settings(self) -> None:
        if self.output.exists():
            try:
                there = (pq.read_schema(self.output).metadata or {}).get(_SETTINGS)
            except pa.ArrowInvalid:
                there = None
            self._refuse_others(self.output, None if there is None else json.loads(there))
            return
        self.folder.mkdir(exist_ok=True)
        file = self.folder / "settings.json"
        if file.exists():
            self._refuse_others(self.folder, json.loads(file.read_text()))
        else:
            with atomic_write(file) as stream:
                stream.write(json.dumps(self._settings, indent=1).encode())

    def _refuse_others(self, there: Path, settings: Any) -> None:
        if settings == self._settings:
            return
        if settings is None:
            what = "was not written by main_generation"
        else:
            names = sorted({*settings, *self._settings})
            other = [name for name in names if settings.get(name) != self._settings.get(name)]
            what = f"holds answers of a run with another {', '.join(other)}"
        raise ValueError(f"data.output_path: {there} {what}. Choose another path, or delete it.")

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:06d}.parquet"


def _write(table: pa.Table, file: Path) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    with atomic_write(file) as stream:
        stream.write(sink.getvalue())
