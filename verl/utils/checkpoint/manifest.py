"""The manifest of a checkpoint: path, size and checksum of every file, so that damage is found and named.

A folder is whole when it has a manifest and every file in it is as the manifest says. Writers take checksums as the
bytes go by (`ChecksumRecorder`); only what they did not take is read when the manifest is written.
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
from types import TracebackType
from typing import Any

from verl.utils.disk import UncachedFile, atomic_write
from verl.utils.progress import pulse

MANIFEST = "manifest.json"
LATEST = "latest"
"""A file in a run's folder that names its newest step."""

_FORMAT = "verl.checkpoint/1"
_RECORDS = ".checksums"
_BLOCK = 4 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """What a file must be."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """All files of one step. `serial` grows with every save into a root: the later of two saves has the larger.

    `dropped` are the parts (folders of the step) that were deleted since, on purpose.
    """

    step: int
    serial: int
    files: Mapping[str, FileRecord]
    dropped: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(record.size for record in self.files.values())

    def has_part(self, part: str) -> bool:
        """Whether files of that folder are listed; "." is the step itself."""
        return any(_is_in(name, part) for name in self.files)


class ChecksumRecorder:
    """Checksums of the files that one process writes into a step, taken while it writes them.

    with ChecksumRecorder(folder) as recorder:
        with recorder.open("shard_0.bin") as stream: ...

    They are left for the manifest of the step around `folder`, if it is in one (see `expect_records`). A stream that is
    not written front to back, or a file changed afterwards, is read when the manifest is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._taken: dict[Path, dict[str, int]] = {}
        self.failure: OSError | None = None
        """Why a file could not be written; libraries that write through a stream may raise something of their own."""

    def open(self, name: str | os.PathLike[str]) -> io.BufferedIOBase:
        """A stream to a new file in the folder (a relative name, or a path inside it); on disk once it is closed."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return _ChecksumStream(path, self._taken, self._failed)

    def renamed(self, old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
        """A file written through this recorder has another name now."""
        if self._folder / old in self._taken:
            self._taken[self._folder / new] = self._taken.pop(self._folder / old)

    def _failed(self, error: OSError) -> None:
        self.failure = self.failure or error

    def close(self) -> None:
        """Leave the records."""
        step = next((place for place in (self._folder, *self._folder.parents) if (place / _RECORDS).is_dir()), None)
        if step is not None and self._taken:
            records = {path.relative_to(step).as_posix(): record for path, record in self._taken.items()}
            (step / _RECORDS / f"{uuid.uuid4().hex}.json").write_text(json.dumps(records))
        self._taken = {}

    def __enter__(self) -> ChecksumRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()


def expect_records(folder: Path) -> None:
    """Make room for the records of files that are written into the step `folder`, at any depth, by any process."""
    (folder / _RECORDS).mkdir(parents=True, exist_ok=True)


def expects_records(folder: Path) -> bool:
    """Whether `folder` is as `expect_records` made it: not one that was deleted, and made again by whoever wrote on."""
    return (folder / _RECORDS).is_dir()


def write_manifest(folder: Path, step: int, serial: int) -> Manifest:
    """Bring all files of `folder` to disk and list them in its manifest; ValueError where there is nothing to list."""
    taken = _collect_records(folder)
    names = sorted(_files_in(folder))
    if not names:
        raise ValueError(f"{folder}: step {step} has no files. Save something into the folder before finishing it.")
    with _pool() as pool:
        records = list(pool.map(lambda name: _sync_and_record(folder / name, taken.get(name)), names))
    manifest = Manifest(step, serial, dict(zip(names, records, strict=True)))
    write_atomically(folder / MANIFEST, _encode(manifest))
    for inside, _, _ in os.walk(folder):
        sync_folder(Path(inside))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step; ValueError says what is wrong with it."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{MANIFEST}: missing, so the step was never finished or is not one of ours") from error
    return decode_manifest(content)


def drop_part(folder: Path, part: str) -> None:
    """Say in the manifest of a step that its folder `part` is gone on purpose. Deleting it comes after."""
    manifest = read_manifest(folder)
    files = {name: record for name, record in manifest.files.items() if not _is_in(name, part)}
    dropped = tuple(sorted({*manifest.dropped, part}))
    write_atomically(folder / MANIFEST, _encode(replace(manifest, files=files, dropped=dropped)))


def decode_manifest(content: bytes) -> Manifest:
    """The manifest in these bytes; ValueError where they were damaged."""
    try:
        fields = json.loads(content)
        own = fields.pop("crc32")
        if fields["format"] != _FORMAT or own != zlib.crc32(_canonical(fields)):
            raise ValueError("its checksum does not fit")
        files = {_inside(name): FileRecord(**record) for name, record in fields["files"].items()}
        return Manifest(fields["step"], fields["serial"], files, tuple(fields.get("dropped", ())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST}: damaged ({error})") from error


def find_problems(folder: Path) -> list[str]:
    """What keeps a step from being whole, one line per file or part; [] when it is."""
    try:
        manifest = read_manifest(folder)
    except (ValueError, OSError) as error:
        return [str(error)]
    dropped = [f"{part}: deleted, trainer.max_{part}_ckpt_to_keep limits them" for part in manifest.dropped]
    return dropped + damaged_files(folder, manifest)


def damaged_files(folder: Path, manifest: Manifest, contents: bool = True) -> list[str]:
    """Files of a step that are not as its manifest says, one line each. `contents=False` compares sizes only."""
    with _pool() as pool:
        found = pool.map(lambda item: _problem(folder, item[0], item[1], contents), manifest.files.items())
        return [problem for problem in found if problem]


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a small file, and bring that to disk."""
    with atomic_write(path) as file:
        file.write(content)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _ChecksumStream(io.BufferedWriter):
    """A file being written whose checksum grows with it."""

    def __init__(self, path: Path, taken: dict[Path, dict[str, int]], failed: Callable[[OSError], None]) -> None:
        super().__init__(UncachedFile(path))
        self._failed = failed
        self._path, self._taken = path, taken
        self._crc, self._size, self._in_order = 0, 0, True

    def write(self, data: Any) -> int:
        self._in_order = self._in_order and self.tell() == self._size
        try:
            written = super().write(data)
        except OSError as error:
            self._failed(error)
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
            self._failed(error)
            self.raw.close()  # closing the stream would try again to write what does not fit
            raise
        super().close()
        if self._in_order:
            self._taken[self._path] = {"size": self._size, "crc32": self._crc, "modified": modified}


def _collect_records(folder: Path) -> dict[str, dict[str, int]]:
    """What recorders left for this step, by path in it; their own files are removed."""
    taken: dict[str, dict[str, int]] = {}
    if (folder / _RECORDS).is_dir():
        for file in (folder / _RECORDS).iterdir():
            taken.update(json.loads(file.read_text()))
        shutil.rmtree(folder / _RECORDS)
    return taken


def _sync_and_record(path: Path, taken: Mapping[str, int] | None) -> FileRecord:
    stat = path.stat()
    if taken is not None and (taken["size"], taken["modified"]) == (stat.st_size, stat.st_mtime_ns):
        return FileRecord(taken["size"], taken["crc32"])  # and its writer brought it to disk
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _read_record(file)


def _read_record(file: io.BufferedReader) -> FileRecord:
    size, crc, block = 0, 0, memoryview(bytearray(_BLOCK))
    while count := file.readinto(block):
        crc = zlib.crc32(block[:count], crc)
        pulse()
        size += count
    return FileRecord(size, crc)


def _problem(folder: Path, name: str, expected: FileRecord, contents: bool) -> str | None:
    path = folder / name
    try:
        size = path.stat().st_size
        if size != expected.size:
            kind = "truncated" if size < expected.size else "changed"
            return f"{name}: {kind}, {size} of {expected.size} bytes"
        if contents:
            with path.open("rb") as file:
                if _read_record(file) != expected:
                    return f"{name}: damaged, its content does not fit its checksum"
    except (FileNotFoundError, NotADirectoryError):
        return f"{name}: missing"
    except OSError as error:
        return f"{name}: unreadable ({error.strerror})"
    return None


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is not inside the step")
    return name


def _is_in(name: str, part: str) -> bool:
    return part == "." or name.startswith(f"{part}/")


def _files_in(folder: Path) -> Iterator[str]:
    for inside, _, names in os.walk(folder):
        for name in names:
            relative = (Path(inside) / name).relative_to(folder).as_posix()
            if relative != MANIFEST:
                yield relative


def _encode(manifest: Manifest) -> bytes:
    files = {name: asdict(record) for name, record in manifest.files.items()}
    fields: dict[str, Any] = {"format": _FORMAT, "step": manifest.step, "serial": manifest.serial, "files": files}
    fields["dropped"] = list(manifest.dropped)
    # With a checksum of its own: a flipped bit in a name or size is damage, not another file.
    return json.dumps({**fields, "crc32": zlib.crc32(_canonical(fields))}, indent=1).encode()


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


def _pool() -> ThreadPoolExecutor:
    """Reading and crc32 run outside the interpreter lock, so files are checked side by side."""
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
