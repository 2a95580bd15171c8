"""RecordWriter: writes the streams of a run in a background thread, within the budgets of `trainer.record.*`.

The functions below it select what is kept: groups, steps, and recordings of earlier runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.recording import schema
from verl.recording.redaction import Redaction
from verl.utils.concurrency import JobThread
from verl.utils.disk import JsonLines, atomic_write, to_json
from verl.version import __version__

logger = logging.getLogger(__name__)

# Maximum number of waiting jobs; each keeps its batch in memory.
_MAX_WAITING = 2
MAX_LINES = 20_000
_ROW_GROUP = 128
# Streams of which steps may be deleted, in this order.
_DELETABLE = ("trajectories", "rows", "pairs", "validation")
# Streams that are recorded even if the budget is used up.
_ALWAYS_RECORDED = ("metrics", "events")
# Folder of the steps that a later attempt trains again: <folder>/<attempt>/<stream>.
_SUPERSEDED = "superseded"
# Seconds after the last change of a recording in which it may belong to a run in progress.
_ACTIVE_S = 3600.0


class RecordWriter:
    """One per attempt of a run; the caller owns the folder. Methods are thread-safe and do not wait for the disk.

    The first error of the thread is stored until `raise_error`; the thread goes on with the next record.
    """

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        first_step: int = 0,
        max_bytes: int | None = None,
        redaction: Redaction | None = None,
        run_id: str | None = None,
        thread: JobThread | None = None,
    ) -> None:
        """`run`: contents of `run.json` besides the version. `first_step`: the first step that will be recorded.
        `thread`: writes the files (None: one of its own).

        `run_id`: id of the command, which its restarts share. A recording that this run does not continue (`first_step`
        is 0, and the id differs) is moved to `record_before_<time>`.

        `max_bytes`: budget of this recording and of the moved ones together; moved ones are deleted first.
        """
        self.folder, self._redaction = folder, redaction or Redaction()
        self._max_bytes = max_bytes
        if first_step == 0:
            set_aside(folder, run_id)
        folder.mkdir(parents=True, exist_ok=True)
        self.attempt = 1 + _last_attempt(folder / schema.STREAMS["events"].path)
        self._move_superseded_steps(first_step)
        content = {"schema": schema.VERSION, "verl": __version__, "run_id": run_id, **self._redaction.value(run)}
        with atomic_write(folder / schema.RUN_FILE) as file:
            file.write((to_json(content, indent=1) + "\n").encode())
        self._files = {
            name: JsonLines(folder / stream.path) for name, stream in schema.STREAMS.items() if stream.layout == "lines"
        }
        self._earlier = earlier_recordings(folder)
        """Recordings of other runs in the same folder, the oldest first."""
        self._bytes = size_of(folder) + sum(map(size_of, self._earlier))
        self._lines: list[tuple[str, Mapping[str, Any]]] = []
        """Records that are not written yet."""
        self._dropped: Counter[str] = Counter()
        """Records per stream that were not queued since the last event `dropped_records`."""
        self._step = first_step
        """Newest step of a record."""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        """Jobs that have not started, with their steps."""
        self._error: Exception | None = None
        self._stopped = self._is_closed = False
        self._owns_thread, self._thread = thread is None, thread or JobThread("recording")

    # ---------------------------------------------------------------- from any thread

    def line(self, stream: str, record: Mapping[str, Any]) -> None:
        """Append a record to a stream of JSON lines, with the number of the attempt. If the thread has fallen behind
        by too many records, the record is dropped, with an event. Records after `close` may be lost."""
        with self._lock:
            self._step = max(self._step, record.get("step") or 0)
            if len(self._lines) >= MAX_LINES:
                self._dropped[stream] += 1
                return
            self._lines.append((stream, {**record, "attempt": self.attempt}))
            if len(self._lines) == 1 and not self._is_closed:
                self._thread.submit(partial(self._guard, self._append_lines))

    def event(self, kind: str, step: int, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Record an event of a kind of `schema.EVENTS`."""
        self.line("events", self._event_record(kind, step, message, data))

    def submit(self, job: Callable[[], None], step: int | None) -> None:
        """Run a job in the thread. `step`: the job records this step; None: it is never skipped.

        If too many steps wait, because the thread is slower than training, the oldest one is skipped, with an event.
        """
        if step is None:
            self._thread.submit(partial(self._guard, job))
            return
        with self._lock:
            skipped = self._waiting.popleft() if len(self._waiting) >= _MAX_WAITING else None
            self._waiting.append((job, step))
        if skipped is not None:
            self.event("skipped", skipped[1])
        self._thread.submit(self._run_next_job)

    def raise_error(self) -> None:
        """Raise the error of the thread that was not raised yet, if any."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, timeout: float = 60.0) -> None:
        """Write everything that was recorded, for up to `timeout` seconds; safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True  # from now on, `_close_files` writes the lines
        try:
            self._thread.submit(self._close_files).result(timeout)
        except TimeoutError:
            logger.warning("recording: not everything could be written to %s in %.0f s", self.folder, timeout)
        if self._owns_thread:
            self._thread.close()

    # ---------------------------------------------------------------- in the thread of the writer (from jobs)

    def write_table(
        self, stream: str, step: int, rows: Mapping[str, Sequence[Any]], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Write the rows of a step, as columns; columns that are missing are null. Replaces the step's file, if any."""
        if self._stopped:
            return
        table = self.table(stream, rows)
        content = {"attempt": self.attempt, "schema": schema.VERSION, **(metadata or {})}
        table = table.replace_schema_metadata({"verl": json.dumps(content)})
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

    def _event_record(self, kind: str, step: int, message: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        text = to_json(self._redaction.value(data)) if data else None
        return {
            "time": round(time.time(), 3),
            "step": step,
            "kind": kind,
            "message": self._redaction.text(message),
            "data": text,
        }

    def _run_next_job(self) -> None:
        with self._lock:
            job = self._waiting.popleft()[0] if self._waiting else None  # None: it was skipped
        if job is not None:
            self._guard(job)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised by `raise_error`
            if self._error is None:
                # The frames of tracebacks refer to batches, which must not stay in memory.
                error.__context__ = error.__cause__ = None
                self._error = error.with_traceback(None)

    def _append_lines(self) -> None:
        """Append the records that are not written yet, with one write per stream."""
        with self._lock:
            lines, self._lines = self._lines, []
            dropped, self._dropped = self._dropped, Counter()
        if dropped:
            event = self._event_record("dropped_records", self._step, "", dropped)
            lines.append(("events", {**event, "attempt": self.attempt}))
            logger.warning("recording: %d records were dropped: the disk is too slow", dropped.total())
        by_stream: dict[str, list[Any]] = defaultdict(list)
        for stream, record in lines:
            # The data of events is JSON, which is redacted before it is encoded.
            by_stream[stream].append(record if stream == "events" else self._redaction.value(record))
        for name, records in by_stream.items():
            if not self._stopped or name in _ALWAYS_RECORDED:
                self._bytes += self._files[name].append(records)
        self._shrink()

    def _close_files(self) -> None:
        while self._lines or self._dropped:  # writing may add events
            self._guard(self._append_lines)
        for file in self._files.values():
            file.close()

    def _shrink(self, newest: int | None = None) -> None:
        """Delete recordings of earlier runs, superseded steps and then other steps until the budget is kept. If the
        small streams alone exceed it, only metrics and events are recorded from now on."""
        if self._stopped or self._max_bytes is None or self._bytes <= self._max_bytes:
            return
        self._delete_earlier_recordings()
        self._delete_superseded_steps()
        files = {stream: self._step_files(stream) for stream in _DELETABLE}
        deletable = sum(path.stat().st_size for paths in files.values() for path in paths.values())
        if self._bytes - deletable > self._max_bytes:
            self._stop(newest)
            return
        for stream, paths in files.items():
            dropped = []
            while self._bytes > self._max_bytes and paths:
                step = step_to_drop(sorted(paths))
                step = min(paths) if step is None else step
                path = paths.pop(step)
                self._bytes -= path.stat().st_size
                path.unlink()
                dropped.append(step)
            if dropped:
                self.event("deleted_steps", max(dropped), data={"stream": stream, "steps": sorted(dropped)})

    def _stop(self, newest: int | None) -> None:
        limit = f"trainer.record.max_gb ({(self._max_bytes or 0) / 1e9:g} GB)"
        reason = f"the small streams alone exceed {limit}; only metrics and events are recorded from now on"
        self._stopped = True
        self.event("stopped", self._step if newest is None else newest, reason)
        logger.warning("recording: %s: %s", self.folder, reason)

    def _step_files(self, stream: str) -> dict[int, Path]:
        """Return the files of a stream by step."""
        files = {schema.step_of_file(path.name): path for path in (self.folder / stream).glob("*.parquet")}
        return {step: path for step, path in files.items() if step is not None}

    def _move_superseded_steps(self, first_step: int) -> None:
        """Move the files of steps that this attempt trains again to `superseded/<attempt>`. They are deleted first if
        the recording exceeds its budget."""
        for stream in schema.STREAMS.values():
            files = self._step_files(stream.path) if stream.layout == "steps" else {}
            for step, path in files.items():
                if step >= first_step:
                    target = self.folder / _SUPERSEDED / str(self.attempt) / stream.path
                    target.mkdir(parents=True, exist_ok=True)
                    path.rename(target / path.name)

    def _delete_earlier_recordings(self) -> None:
        assert self._max_bytes is not None
        while self._earlier and self._bytes > self._max_bytes:
            folder = self._earlier.pop(0)
            self._bytes -= size_of(folder)
            delete_recording(folder, self._max_bytes)

    def _delete_superseded_steps(self) -> None:
        assert self._max_bytes is not None
        for path in sorted((self.folder / _SUPERSEDED).rglob("*.parquet"), key=lambda path: path.stat().st_mtime):
            if self._bytes <= self._max_bytes:
                return
            self._bytes -= path.stat().st_size
            path.unlink()


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


def set_aside(folder: Path, run_id: str | None) -> None:
    """Move the recording in `folder` to `<folder>_before_<time>`, unless it is of the command `run_id`."""
    if folder.exists() and (run_id is None or _run_id(folder) != run_id):
        target = folder.with_name(f"{folder.name}_before_{time.strftime('%Y%m%d-%H%M%S')}")
        while target.exists():
            target = target.with_name(f"{target.name}-1")
        os.rename(folder, target)


def earlier_recordings(folder: Path) -> list[Path]:
    """Return the recordings that `set_aside` has moved, the oldest first."""
    return sorted(folder.parent.glob(f"{folder.name}_before_*"), key=_changed)


def delete_oldest(folders: Iterable[Path], max_bytes: int) -> list[Path]:
    """Delete the oldest folders until all together are within `max_bytes`; return the deleted ones.

    The newest one, and folders in which a file changed within the last hour, are kept: runs may be recording in them.
    """
    newest_first = sorted(folders, key=_changed, reverse=True)
    total, deleted = sum(map(size_of, newest_first[:1])), []
    for folder in newest_first[1:]:
        total += size_of(folder)
        if total > max_bytes and time.time() - _changed(folder) >= _ACTIVE_S and delete_recording(folder, max_bytes):
            deleted.append(folder)
    return deleted


def delete_recording(folder: Path, max_bytes: int) -> bool:
    """Delete a recording that exceeds the budget; return False if another process has deleted it."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return False
    limit = f"trainer.record.max_gb ({max_bytes / 1e9:g} GB)"
    logger.warning("recording: deleted %s to stay within %s", folder.name, limit)
    return True


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(stat.st_size for stat in _stats(folder))


def _changed(folder: Path) -> float:
    """Time of the last change of a file in the folder; 0 if it has none."""
    return max((stat.st_mtime for stat in _stats(folder)), default=0.0)


def _stats(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of every file in a folder. Other processes may write and delete files meanwhile."""
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(root, name))


def _run_id(folder: Path) -> str | None:
    try:
        return json.loads((folder / schema.RUN_FILE).read_bytes())["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def groups_within(sizes: Sequence[int], budget: int, seed: int) -> list[int]:
    """Return the indices of the groups to record, in ascending order: all if they fit into `budget` bytes, else a
    uniform sample.

    The groups are put in a random order, and recorded up to the first one that does not fit. `sizes`: bytes of each.
    """
    if sum(sizes) <= budget:
        return list(range(len(sizes)))
    order = np.random.default_rng(seed).permutation(len(sizes))
    fitting = int(np.searchsorted(np.cumsum(np.asarray(sizes)[order]), budget, side="right"))
    return sorted(order[:fitting].tolist())


def step_to_drop(steps: Sequence[int]) -> int | None:
    """Return the recorded step whose removal leaves the smallest gap, so that the remaining ones stay evenly spaced;
    of equal gaps the earliest. Never the first or the last step. None if there is no other.

    `steps`: in ascending order.
    """
    gaps = [(steps[i + 1] - steps[i - 1], steps[i]) for i in range(1, len(steps) - 1)]
    return min(gaps)[1] if gaps else None
