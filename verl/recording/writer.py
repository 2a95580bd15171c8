"""RecordWriter: writes the streams of a run in a background thread, within the budgets of `trainer.record.*`."""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from verl.recording import schema
from verl.recording.redaction import Redaction
from verl.recording.sampling import step_to_drop
from verl.utils.disk import atomic_write
from verl.utils.json_lines import JsonLines, to_json
from verl.version import __version__

__all__ = ["RecordWriter"]

_Item: TypeAlias = Callable[[], None] | tuple[str, Mapping[str, Any]]
"""A job, or a record of a stream of JSON lines."""

logger = logging.getLogger(__name__)

# Jobs that refer to a batch, which they keep in memory.
_MAX_JOBS = 2
_MAX_LINES = 20_000
_ROW_GROUP = 128
# Streams of which steps may be deleted, in this order.
_THINNED = ("trajectories", "validation")


class RecordWriter:
    """One per attempt of a run; the caller owns the folder. Methods are thread-safe and do not wait for the disk.

    Errors of the thread are stored until `raise_error`; the thread goes on with the next record.
    """

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        first_step: int = 0,
        max_bytes: int | None = None,
        redaction: Redaction | None = None,
        run_id: str | None = None,
    ) -> None:
        """`run`: contents of `run.json` besides the version. `first_step`: the first step that will be recorded.

        `run_id`: id of the command, which its restarts share. A recording that this run does not continue (`first_step`
        is 0, and the id differs) is moved to `record_before_<time>`.
        """
        self.folder, self._redaction = folder, redaction or Redaction()
        self._max_bytes = max_bytes
        self._set_aside(first_step, run_id)
        folder.mkdir(parents=True, exist_ok=True)
        self._delete_steps(first_step)
        self.attempt = 1 + _last_attempt(folder / schema.STREAMS["events"].path)
        content = {"schema": schema.VERSION, "verl": __version__, "run_id": run_id, **self._redaction.value(run)}
        with atomic_write(folder / schema.RUN_FILE) as file:
            file.write((to_json(content, indent=1) + "\n").encode())
        self._files = {
            name: JsonLines(folder / stream.path) for name, stream in schema.STREAMS.items() if stream.layout == "lines"
        }
        self._bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self._items: list[_Item] = []
        self._changed = threading.Condition()
        self._closing = False
        self._jobs = threading.Semaphore(_MAX_JOBS)
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- from any thread

    def line(self, stream: str, record: Mapping[str, Any]) -> None:
        """Append a record to a stream of JSON lines, with the number of the attempt."""
        if len(self._items) < _MAX_LINES:
            self._put((stream, {**record, "attempt": self.attempt}))

    def event(self, kind: str, step: int, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Record an event of a kind of `schema.EVENTS`."""
        text = to_json(self._redaction.value(data)) if data else None
        self.line("events", {"time": _now(), "step": step, "kind": kind, "message": message, "data": text})

    def submit(self, job: Callable[[], None]) -> bool:
        """Run a job in the thread, after everything that was recorded before. Returns False, and does not run it, if
        the thread has not finished earlier jobs."""
        if not self._jobs.acquire(blocking=False):
            return False

        def run() -> None:
            try:
                job()
            finally:
                self._jobs.release()

        self._put(run)
        return True

    def raise_error(self) -> None:
        """Raise the oldest error of the thread that was not raised yet."""
        if not self._errors.empty():
            raise self._errors.get()

    def close(self, timeout: float = 60.0) -> None:
        """Write everything that was recorded, for up to `timeout` seconds, and end the thread; safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("recording: not everything could be written to %s in %.0f s", self.folder, timeout)

    # ---------------------------------------------------------------- in the thread of the writer (from jobs)

    def write_table(
        self, stream: str, step: int, rows: Mapping[str, Sequence[Any]], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Write the rows of a step, as columns; columns that are missing are null. Replaces the step's file, if any."""
        if self._stopped:
            return
        table = self.table(stream, rows)
        facts = {"attempt": self.attempt, "schema": schema.VERSION, **(metadata or {})}
        table = table.replace_schema_metadata({"verl": json.dumps(facts)})
        path = self.folder / schema.step_file(stream, step)
        self._write_parquet(table, path)
        self._shrink(step)

    def write_tokens(self, rows: Mapping[str, Sequence[Any]]) -> None:
        """Write the vocabulary."""
        self._write_parquet(self.table("tokens", rows), self.folder / schema.TOKENS_FILE)

    @staticmethod
    def table(stream: str, rows: Mapping[str, Sequence[Any]]) -> pa.Table:
        """Return the rows as an Arrow table with the schema of the stream."""
        fields, count = schema.arrow_schema(stream), len(next(iter(rows.values())))
        return pa.Table.from_arrays(
            [_array(rows.get(field.name, pa.nulls(count, field.type)), field.type) for field in fields], schema=fields
        )

    def _write_parquet(self, table: pa.Table, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replaced = path.stat().st_size if path.exists() else 0
        floats = [f"{f.name}.list.element" for f in table.schema if f.type == pa.list_(pa.float32())]
        texts = [f.name for f in table.schema if pa.types.is_string(f.type)]
        with atomic_write(path) as file:
            pq.write_table(
                table,
                file,
                row_group_size=_ROW_GROUP,
                compression="zstd",
                use_dictionary=texts,
                use_byte_stream_split=floats or False,
                write_statistics=False,
            )
        self._bytes += path.stat().st_size - replaced

    def _put(self, item: _Item) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def _run(self) -> None:
        while items := self._take():
            lines: list[tuple[str, Mapping[str, Any]]] = []
            for item in items:
                if isinstance(item, tuple):
                    lines.append(item)
                else:
                    self._guard(functools.partial(self._append, lines))
                    lines = []
                    self._guard(item)
            self._guard(functools.partial(self._append, lines))
        for file in self._files.values():
            file.close()

    def _take(self) -> list[_Item]:
        """Wait for items and take all; [] when the writer is closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closing)
            items, self._items = self._items, []
            return items

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised by `raise_error`, or by the future of the job
            self._errors.put(error)

    def _append(self, lines: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Append these lines, with one write per stream."""
        by_stream: dict[str, list[Any]] = defaultdict(list)
        for stream, record in lines:
            by_stream[stream].append(self._redaction.value(record))
        for name, records in by_stream.items():
            if not self._stopped:
                self._bytes += self._files[name].append(records)
        self._shrink()

    def _shrink(self, newest: int | None = None) -> None:
        """Delete steps until the recording is within its budget; stop recording if that is not possible."""
        if self._stopped or self._max_bytes is None or self._bytes <= self._max_bytes:
            return
        for stream in _THINNED:
            files = {step: path for path in (self.folder / stream).glob("*.parquet")
                     if (step := schema.step_of_file(path)) is not None}  # fmt: skip
            dropped = []
            while self._bytes > self._max_bytes and files:
                step = step_to_drop(sorted(files))
                step = min(files) if step is None else step
                path = files.pop(step)
                self._bytes -= path.stat().st_size
                path.unlink()
                dropped.append(step)
            if dropped:
                self.event("thinned", max(dropped), data={"stream": stream, "steps": sorted(dropped)})
        if self._bytes > self._max_bytes:
            reason = f"the small streams alone exceed trainer.record.max_gb ({self._max_bytes / 1e9:g} GB)"
            # Not by `event`: later lines are not written.
            event = {"time": _now(), "attempt": self.attempt, "step": newest, "kind": "stopped", "message": reason}
            self._files["events"].append([event])
            self._stopped = True
            logger.warning("recording stops: %s: %s", self.folder, reason)

    def _delete_steps(self, first_step: int) -> None:
        """Delete the files of steps that this attempt trains again."""
        for stream in schema.STREAMS.values():
            for path in (self.folder / stream.path).glob("*.parquet") if stream.layout == "steps" else ():
                if (step := schema.step_of_file(path)) is not None and step >= first_step:
                    path.unlink()

    def _set_aside(self, first_step: int, run_id: str | None) -> None:
        try:
            known = json.loads((self.folder / schema.RUN_FILE).read_bytes())["run_id"]
        except (OSError, ValueError, KeyError, TypeError):
            known = None
        if first_step == 0 and self.folder.exists() and (run_id is None or known != run_id):
            aside = self.folder.with_name(f"{self.folder.name}_before_{time.strftime('%Y%m%d-%H%M%S')}")
            while aside.exists():
                aside = aside.with_name(f"{aside.name}-1")
            os.rename(self.folder, aside)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, kind)


def _last_attempt(events: Path) -> int:
    """Return the largest number of an attempt in the events; 0 if there are none."""
    last = 0
    if events.is_file():
        for line in events.read_bytes().splitlines():
            try:
                last = max(last, int(json.loads(line)["attempt"]))
            except (ValueError, KeyError, TypeError):  # the truncated line of a killed run
                continue
    return last


def _now() -> float:
    return round(time.time(), 3)
