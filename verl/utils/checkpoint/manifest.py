"""The manifest of a checkpoint: path, size and checksum of every file, so that damage is found and named.

A step is complete if it has a manifest and every file matches it. Checksums are computed while files are written
(`ChecksumRecorder`). Files that were written in another way are read when the manifest is written.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from verl.utils.disk import UncachedFile, sync_folder, write_durably
from verl.utils.progress import pulse

MANIFEST = "manifest.json"
LATEST = "latest"
"""A file in a run's folder that names its newest step."""

_FORMAT = "verl.checkpoint/1"
# Subfolder of an unfinished step: checksums of the files that `ChecksumRecorder`s have written.
_RECORDS = ".checksums"
# Bytes read at a time.
_BLOCK = 4 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """Expected size and checksum of a file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """All files of one step."""

    step: int
    serial: int
    """Grows with every save of a run, so it orders saves by time: a step may be saved again after a later one."""
    files: Mapping[str, FileRecord]
    """By path in the step."""
    dropped: tuple[str, ...] = ()
    """Parts (folders of the step) that were deleted because of `trainer.max_*_ckpt_to_keep`."""

    @property
    def total_bytes(self) -> int:
        """Total size of all files."""
        return sum(record.size for record in self.files.values())

    def has_part(self, part: str) -> bool:
        """Return whether files of the folder `part` are listed; "." is the step itself."""
        return any(_is_in(name, part) for name in self.files)


class ChecksumRecorder:
    """Computes the checksums of the files that one process writes into a step, while it writes them:

    with ChecksumRecorder(folder) as recorder:
        with recorder.open("shard_0.bin") as stream: ...

    `close` stores them for the manifest of the enclosing step, if `folder` is in one (see `prepare_records`). A file
    that is not written sequentially, or is changed afterwards, is read when the manifest is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._records: dict[Path, dict[str, int]] = {}
        self.failure: OSError | None = None
        """The first failed write; libraries that write through a stream may raise another error instead."""

    def open(self, name: str | os.PathLike[str]) -> io.BufferedIOBase:
        """Open a new file in the folder (a relative name, or a path inside it); closing it flushes it to disk."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return _ChecksumStream(path, self._records, self._on_failure)

    def renamed(self, old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
        """Record that a file of this recorder was renamed."""
        if self._folder / old in self._records:
            self._records[self._folder / new] = self._records.pop(self._folder / old)

    def _on_failure(self, error: OSError) -> None:
        self.failure = self.failure or error

    def close(self) -> None:
        """Store the records in the enclosing step."""
        step = next((folder for folder in (self._folder, *self._folder.parents) if (folder / _RECORDS).is_dir()), None)
        if step is not None and self._records:
            records = {path.relative_to(step).as_posix(): record for path, record in self._records.items()}
            (step / _RECORDS / f"{uuid.uuid4().hex}.json").write_text(json.dumps(records))
        self._records = {}

    def __enter__(self) -> ChecksumRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


def prepare_records(folder: Path) -> None:
    """Create the step `folder` with its subfolder for the records of all recorders, of any process."""
    (folder / _RECORDS).mkdir(parents=True, exist_ok=True)


def has_records_folder(folder: Path) -> bool:
    """Return whether `prepare_records` created `folder`; False if it was deleted and created again by a writer."""
    return (folder / _RECORDS).is_dir()


def write_manifest(folder: Path, step: int, serial: int) -> Manifest:
    """Flush all files of `folder` to disk and list them in its manifest. ValueError: there are no files."""
    recorded = _collect_records(folder)
    names = sorted(_files_in(folder))
    if not names:
        raise ValueError(f"{folder}: step {step} has no files. Save something into the folder before `commit`.")
    with _pool() as pool:
        records = list(pool.map(lambda name: _sync_and_record(folder / name, recorded.get(name)), names))
    manifest = Manifest(step, serial, dict(zip(names, records, strict=True)))
    write_durably(folder / MANIFEST, encode_manifest(manifest))
    for directory, _, _ in os.walk(folder):
        sync_folder(Path(directory))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a step. ValueError: it is missing or damaged."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{MANIFEST}: missing, so the step was never finished or is not a checkpoint of verl"
        ) from error
    return decode_manifest(content)


def drop_part(folder: Path, part: str) -> None:
    """Mark the folder `part` of a step as deleted on purpose in its manifest, before it is deleted."""
    manifest = read_manifest(folder)
    files = {name: record for name, record in manifest.files.items() if not _is_in(name, part)}
    dropped = tuple(sorted({*manifest.dropped, part}))
    write_durably(folder / MANIFEST, encode_manifest(replace(manifest, files=files, dropped=dropped)))


def decode_manifest(content: bytes) -> Manifest:
    """Parse a manifest. ValueError: it is damaged."""
    try:
        fields = json.loads(content)
        checksum = fields.pop("crc32")
        if checksum != zlib.crc32(_canonical(fields)):
            raise ValueError("its checksum does not match")
        if fields["format"] != _FORMAT:
            raise ValueError(f"its format is {fields['format']!r}, not {_FORMAT!r}")
        files = {_check_inside(name): FileRecord(**record) for name, record in fields["files"].items()}
        return Manifest(fields["step"], fields["serial"], files, tuple(fields.get("dropped", ())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST}: damaged ({error})") from error


def find_problems(folder: Path) -> list[str]:
    """Return why a step is incomplete or damaged, one line per file or part; [] if it is complete."""
    try:
        manifest = read_manifest(folder)
    except (ValueError, OSError) as error:
        return [str(error)]
    dropped = [f"{part}: deleted, because of trainer.max_{part}_ckpt_to_keep" for part in manifest.dropped]
    return dropped + damaged_files(folder, manifest)


def damaged_files(folder: Path, manifest: Manifest, contents: bool = True) -> list[str]:
    """Return a line for each file of a step that does not match its manifest: `name: problem`.

    `contents=False`: only sizes are compared.
    """
    with _pool() as pool:
        problems = pool.map(lambda item: _find_problem(folder, item[0], item[1], contents), manifest.files.items())
        return [problem for problem in problems if problem]


class _ChecksumStream(io.BufferedWriter):
    """A new file whose checksum is computed while it is written."""

    def __init__(self, path: Path, records: dict[Path, dict[str, int]], on_failure: Callable[[OSError], None]) -> None:
        super().__init__(UncachedFile(path))
        self._path, self._records, self._on_failure = path, records, on_failure
        self._crc, self._size = 0, 0
        self._in_order = True
        """Whether every write was at the end of the file; otherwise the checksum is invalid."""

    def write(self, data: Any) -> int:
        self._in_order = self._in_order and self.tell() == self._size
        try:
            written = super().write(data)
        except OSError as error:
            self._on_failure(error)
            raise
        self._crc = zlib.crc32(data, self._crc)
        self._size += written
        return written

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
            modified = os.fstat(self.fileno()).st_mtime_ns
        except OSError as error:
            self._on_failure(error)
            self.raw.close()  # closing the stream would write the rest of the buffer again
            raise
        super().close()
        if self._in_order:
            self._records[self._path] = {"size": self._size, "crc32": self._crc, "modified": modified}


def _collect_records(folder: Path) -> dict[str, dict[str, int]]:
    """Read and delete the records that `ChecksumRecorder`s have stored in a step; return them by path in the step."""
    records: dict[str, dict[str, int]] = {}
    if (folder / _RECORDS).is_dir():
        for file in (folder / _RECORDS).iterdir():
            records.update(json.loads(file.read_text()))
        shutil.rmtree(folder / _RECORDS)
    return records


def _sync_and_record(path: Path, recorded: Mapping[str, int] | None) -> FileRecord:
    """Return the record of a file, which is read and flushed to disk unless it is unchanged since it was `recorded`."""
    stat = path.stat()
    if recorded is not None and (recorded["size"], recorded["modified"]) == (stat.st_size, stat.st_mtime_ns):
        return FileRecord(recorded["size"], recorded["crc32"])  # flushed by `_ChecksumStream.close`
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _read_record(file)


def _read_record(file: io.BufferedReader) -> FileRecord:
    """Read a file and return its size and checksum."""
    size, crc, block = 0, 0, memoryview(bytearray(_BLOCK))
    while count := file.readinto(block):
        crc = zlib.crc32(block[:count], crc)
        pulse()
        size += count
    return FileRecord(size, crc)


def _find_problem(folder: Path, name: str, expected: FileRecord, contents: bool) -> str | None:
    """Return how a file differs from its record; None if it does not."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != expected.size:
            kind = "truncated" if size < expected.size else "changed"
            return f"{name}: {kind}, {size} of {expected.size} bytes"
        if contents:
            with path.open("rb") as file:
                if _read_record(file) != expected:
                    return f"{name}: damaged, its content does not match its checksum"
    except (FileNotFoundError, NotADirectoryError):
        return f"{name}: missing"
    except OSError as error:
        return f"{name}: unreadable ({error.strerror})"
    return None


def _check_inside(name: str) -> str:
    """Return a path of a manifest unchanged; ValueError if it leads out of the step."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is not inside the step")
    return name


def _is_in(name: str, part: str) -> bool:
    return part == "." or name.startswith(f"{part}/")


def _files_in(folder: Path) -> Iterator[str]:
    """Yield the paths of all files in a step, relative to it, without its manifest."""
    for directory, _, names in os.walk(folder):
        for name in names:
            relative = (Path(directory) / name).relative_to(folder).as_posix()
            if relative != MANIFEST:
                yield relative


def encode_manifest(manifest: Manifest) -> bytes:
    files = {name: asdict(record) for name, record in manifest.files.items()}
    fields: dict[str, Any] = {"format": _FORMAT, "step": manifest.step, "serial": manifest.serial, "files": files}
    fields["dropped"] = list(manifest.dropped)
    # The manifest has a checksum, too: a flipped bit in it must not be reported as damage of a file.
    return json.dumps({**fields, "crc32": zlib.crc32(_canonical(fields))}, indent=1).encode()


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


def _pool() -> ThreadPoolExecutor:
    """Return a pool for reading files in parallel: reading and crc32 release the GIL."""
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
