"""`read(folder)`: the recorded streams of a run as lazily loaded Arrow tables, also while the run is writing them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from verl.recording import schema

_ATTEMPT_EVENTS = ("start", "resume")
_MAX_VALUES_WITHOUT_THREADS = 4096


class RecordingError(ValueError):
    """The folder is no recording that this version can read."""


class Attempt(NamedTuple):
    """One start of the program: its number, its first step and its time."""

    number: int
    first_step: int
    time: float


def read(folder: str | Path) -> Recording:
    """Return the recording of a run. `folder`: the run's folder (`trainer.default_local_dir`), or `record` in it.

        run = verl.recording.read("checkpoints/gsm8k/grpo")
        run.metrics.to_pandas()["reward/mean"]
        run.groups.table(step=12)
        run.trajectories.table(step=12, uid=uid, columns=["turns", "advantages"])

    Fields: docs/reference/recording.md. Raises RecordingError for other folders and for recordings of a newer version.
    """
    return Recording(folder)


class Recording:
    """The streams of a run are attributes: `metrics`, `phases`, `engines`, `devices`, `events`, `groups`,
    `trajectories`, `rows`, `pairs`, `validation` and `tokens`. Every access to a stream reads what was recorded until
    then."""

    metrics: MetricStream
    phases: LineStream
    engines: LineStream
    devices: LineStream
    events: LineStream
    groups: StepStream
    trajectories: StepStream
    rows: StepStream
    pairs: StepStream
    validation: StepStream
    tokens: FileStream

    def __init__(self, folder: str | Path) -> None:
        root = Path(folder).expanduser()
        candidates = (root / schema.FOLDER, root)
        record = next((path for path in candidates if (path / schema.RUN_FILE).is_file()), None)
        if record is None:
            why = "has no recording" if root.is_dir() else "is not a folder"
            raise RecordingError(f"{root} {why} (no {schema.FOLDER}/{schema.RUN_FILE}). Pass the folder of a run.")
        self.folder = record
        self._check_version()
        for stream in schema.STREAMS.values():
            kind = {"lines": LineStream, "steps": StepStream, "file": FileStream}[stream.layout]
            setattr(self, stream.name, (MetricStream if stream.name == "metrics" else kind)(self, stream))

    def __repr__(self) -> str:
        return f"Recording({str(self.folder)!r})"

    @property
    def run(self) -> dict[str, Any]:
        """The contents of `run.json`: program, names, version and configuration of the run."""
        try:
            content = json.loads((self.folder / schema.RUN_FILE).read_bytes())
        except ValueError as error:
            raise RecordingError(f"{self.folder / schema.RUN_FILE} is not valid JSON: {error}.") from error
        if not isinstance(content, dict):
            raise RecordingError(f"{self.folder / schema.RUN_FILE} is not a JSON object.")
        return content

    @property
    def streams(self) -> dict[str, Stream]:
        """The streams by name."""
        return {name: getattr(self, name) for name in schema.STREAMS}

    @property
    def attempts(self) -> list[Attempt]:
        """The starts of the program, in order."""
        events = self.events.table()
        if not len(events):
            return []
        starts = events.filter(pc.field("kind").isin(_ATTEMPT_EVENTS)).to_pylist()
        return [Attempt(e["attempt"], int(json.loads(e["data"])["first_step"]), e["time"]) for e in starts]

    def without_superseded(self, table: pa.Table) -> pa.Table:
        """Return the rows of a table with the columns `step` and `attempt` that no later attempt has trained again."""
        keep = pa.chunked_array([pa.repeat(True, len(table))])
        for attempt in self.attempts:
            is_earlier = pc.less(table["attempt"], attempt.number)
            is_again = pc.and_(is_earlier, pc.greater_equal(table["step"], attempt.first_step))
            keep = pc.and_(keep, pc.invert(pc.fill_null(is_again, False)))
        return table.filter(keep)

    def _check_version(self) -> None:
        version = self.run.get("schema")
        if not isinstance(version, int) or version < 1:
            raise RecordingError(f"{self.folder}: {schema.RUN_FILE} has no valid `schema` ({version!r}).")
        if version > schema.VERSION:
            raise RecordingError(
                f"{self.folder}: recorded with schema {version}; this version of verl reads up to {schema.VERSION}."
                " Install a newer verl."
            )


class Stream:
    """One stream. `table()` returns its rows; fields that a recording lacks are null."""

    def __init__(self, recording: Recording, declared: schema.StreamSpec) -> None:
        self._recording, self.declared = recording, declared
        self._path = recording.folder / declared.path

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows, with these columns (None: all)."""
        raise NotImplementedError

    def to_pandas(self, **selection: Any) -> Any:
        """Return `table(**selection)` as a pandas.DataFrame; pandas must be installed."""
        return self.table(**selection).to_pandas(maps_as_pydicts="lossy")

    def _selected(self, table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
        return table if columns is None else table.select(list(columns))


class LineStream(Stream):
    """JSON lines. Lines that are already parsed are not read again; an incomplete last line is ignored."""

    def __init__(self, recording: Recording, declared: schema.StreamSpec) -> None:
        super().__init__(recording, declared)
        self._reset()

    def _reset(self) -> None:
        """Forget everything that was read."""
        self._offset, self._inode = 0, -1
        self._parts = [schema.arrow_schema(self.declared.name).empty_table()]

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        content = self._new_lines()
        if content:
            self._parts.append(self._parse(content))
        if len(self._parts) > 2:
            self._parts = [pa.concat_tables(self._parts).combine_chunks()]
        return self._selected(pa.concat_tables(self._parts), columns)

    def _new_lines(self) -> bytes:
        """Return the complete lines that were appended since the last call."""
        if not self._path.is_file():
            return b""
        with self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._offset:  # a new recording in the same folder
                self._reset()
                self._inode = stat.st_ino
            file.seek(self._offset)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        self._offset += len(content)
        return content

    def _parse(self, content: bytes) -> pa.Table:
        fields = schema.arrow_schema(self.declared.name)
        for name, former in schema.FORMER_NAMES.items():
            if name in fields.names:  # quotes within string values are escaped, so only keys match
                content = content.replace(f'"{former}":'.encode(), f'"{name}":'.encode())
        options = pj.ParseOptions(explicit_schema=fields, unexpected_field_behavior="ignore")
        try:
            block = pj.ReadOptions(block_size=max(1 << 20, len(content) // 8 + 1))
            return pj.read_json(io.BytesIO(content), block, options).select(fields.names)
        except pa.ArrowInvalid:  # a line of a killed run, or a value of another type
            records = [{name: record.get(name) for name in fields.names} for record in _objects(content)]
            return pa.Table.from_pylist(records, schema=fields)


class MetricStream(LineStream):
    """Metrics as a table with a column per metric, besides `step`, `time` and `attempt`; one row per step."""

    def _reset(self) -> None:
        super()._reset()
        self._records: list[dict[str, Any]] = []
        self._key: tuple[int, int] = (0, 0)
        """(number of records, number of attempts) from which the cached rows and columns were computed."""
        self._rows: list[dict[str, Any]] = []
        self._arrays: dict[str, pa.Array] = {}
        self._names: dict[str, None] = {}

    @property
    def names(self) -> list[str]:
        """The names of all metrics."""
        self._load()
        return list(self._names)

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows, with these columns (None: all); a metric that was not recorded is null."""
        self._load()
        self._merge(self._recording.attempts)
        own = {"step": pa.int64(), "time": pa.float64(), "attempt": pa.int32()}
        names = dict.fromkeys([*own, *(self._names if columns is None else columns)])
        for name in names:
            if name not in self._arrays:
                kind = own.get(name)
                values = [row.get(name) if kind else _number(row.get(name)) for row in self._rows]
                self._arrays[name] = pa.array(values, kind or pa.float64())
        return self._selected(pa.table({name: self._arrays[name] for name in names}), columns)

    def _merge(self, attempts: Sequence[Attempt]) -> None:
        """Merge the records into one row per step, unless nothing has changed."""
        key = (len(self._records), len(attempts))
        if key == self._key:
            return
        steps: dict[int, dict[str, Any]] = {}
        for record in self._records:
            match record:
                case {"step": int(step), "attempt": int(attempt), "data": dict(data)}:
                    if not any(later.number > attempt and later.first_step <= step for later in attempts):
                        # Two records of one step: validation before training, after a resume.
                        row = steps.setdefault(step, {"step": step})
                        row |= {"time": record.get("time"), "attempt": attempt, **data}
        self._key, self._rows, self._arrays = key, [steps[step] for step in sorted(steps)], {}

    def _load(self) -> None:
        records = _objects(self._new_lines())
        self._records += records
        for record in records:
            if isinstance(data := record.get("data"), dict):
                self._names |= dict.fromkeys(data)


class StepStream(Stream):
    """A parquet file per step."""

    @property
    def steps(self) -> list[int]:
        """The recorded steps, in order. The writer deletes files of steps that a later attempt trains again."""
        try:
            names = os.listdir(self._path)
        except FileNotFoundError:
            return []
        return sorted(step for name in names if (step := schema.step_of_file(name)) is not None)

    def version(self, step: int) -> int:
        """Return a number that changes when the step is recorded again (modification time); 0 if it is not recorded."""
        try:
            return os.stat(self._recording.folder / schema.step_file(self.declared.name, step)).st_mtime_ns
        except FileNotFoundError:
            return 0

    def table(
        self, columns: Sequence[str] | None = None, *, step: int | None = None, uid: str | None = None
    ) -> pa.Table:
        """Return the rows of a step (None: of all steps, which may be large), or only those of a prompt `uid`."""
        if step is not None:
            return self._read(step, columns, uid)
        parts = [self._read(number, columns, uid) for number in self.steps]
        return pa.concat_tables(parts) if parts else self._selected(self._empty, columns)

    def iterate(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, pa.Table]]:
        """Yield (step, rows) for every step, one in memory at a time."""
        for step in self.steps:
            yield step, self._read(step, columns, None)

    def metadata(self, step: int) -> dict[str, Any]:
        """Return the metadata of a step's file: `attempt`, and of sampled streams how the recorded part was chosen: the
        number of `groups` (or `rows`, `pairs`), the number of those `recorded`, and the `seed`."""
        with self._open(step) as file:
            return json.loads((file.schema_arrow.metadata or {}).get(b"verl", b"{}"))

    @cached_property
    def _empty(self) -> pa.Table:
        return schema.arrow_schema(self.declared.name).empty_table()

    def _open(self, step: int) -> pq.ParquetFile:
        path = self._recording.folder / schema.step_file(self.declared.name, step)
        if not path.is_file():
            raise RecordingError(f"{self.declared.name}: step {step} is not recorded in {self._recording.folder}.")
        try:
            return pq.ParquetFile(path, memory_map=True)
        except pa.ArrowInvalid as error:
            raise RecordingError(f"{path} is damaged: {error}") from error

    def _read(self, step: int, columns: Sequence[str] | None, uid: str | None) -> pa.Table:
        names = list(self._empty.column_names if columns is None else columns)
        with self._open(step) as file:
            present = file.schema_arrow.names  # the property converts the schema at every access
            stored = {name: _stored_name(name, present) for name in names}
            wanted = [name for name in stored.values() if name is not None]
            # For a few values, a thread per column costs more than the read.
            threads = file.metadata.num_rows * len(wanted) > _MAX_VALUES_WITHOUT_THREADS
            table = file.read(wanted, use_threads=threads) if uid is None else self._read_prompt(file, wanted, uid)
        name_of = {former: name for name, former in stored.items() if former is not None}
        table = table.rename_columns([name_of[name] for name in table.column_names]).replace_schema_metadata(None)
        for name in names:
            if stored[name] is None:
                table = table.append_column(name, pa.nulls(len(table), self._empty.schema.field(name).type))
        return table.select(names)

    @staticmethod
    def _read_prompt(file: pq.ParquetFile, columns: list[str], uid: str) -> pa.Table:
        """Read the rows of a prompt, which are adjacent: only their row groups."""
        uids = file.read(["uid"], use_threads=False)["uid"].to_pylist()
        rows = [number for number, value in enumerate(uids) if value == uid]
        if not rows:
            return file.schema_arrow.empty_table().select(columns)
        size = file.metadata.row_group(0).num_rows
        first, last = rows[0] // size, rows[-1] // size
        table = file.read_row_groups(list(range(first, last + 1)), columns, use_threads=False)
        return table.take([number - first * size for number in rows])


def _stored_name(name: str, stored: Sequence[str]) -> str | None:
    """The name under which a file stores the field `name`: this name or its former name; None if it has neither."""
    former = schema.FORMER_NAMES.get(name)
    return name if name in stored else former if former in stored else None


class FileStream(Stream):
    """One parquet file; empty if it was not recorded."""

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        if not self._path.is_file():
            return self._selected(schema.arrow_schema(self.declared.name).empty_table(), columns)
        return pq.read_table(self._path, columns=None if columns is None else list(columns))


def _objects(content: bytes) -> list[dict[str, Any]]:
    """The JSON objects of these lines; other lines, such as the truncated one of a killed run, are left out."""
    records = []
    for line in content.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _number(value: Any) -> float | None:
    """A metric as a number; non-finite values are recorded as texts. None: not a number."""
    if type(value) is float:
        return value
    try:
        return None if value is None or isinstance(value, Mapping | list) else float(value)
    except ValueError:
        return None
