"""The checkpoint folder of a run: step folders (names, order, sizes, leftovers of killed processes), locks, ownership.

All locks end with the process that holds them: a killed run leaves none behind. `writer_lock`, `reader_lock` and
`deleter_lock` guard single saves and steps. `FolderOwnership` reserves a folder for one run from start to end by a
POSIX lock on its file `.owner`, which also names the owner; the lock is not inherited by forked children and works over
NFS. On a file system without locks (with a warning), an owner on the same machine is recognised by its process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar

from verl.utils.checkpoint.manifest import LATEST, MANIFEST, Manifest, damaged_files, read_manifest

logger = logging.getLogger(__name__)

STEP_FORMAT = "global_step_{}"
LOCK = ".lock"
FETCHED = ".remote"
"""Folder for steps that were copied back from a remote."""
ITERATION = "latest_checkpointed_iteration.txt"
RECORD_FOLDER = "record"
"""Folder with the recording of the run (`verl.recording`)."""

_LEFTOVER = re.compile(r"\.(?P<step>global_step_\d+)\.(?P<kind>tmp|old|del)-\d+-[0-9a-f]+")
_PARTIAL = re.compile(rf"\.({re.escape(LATEST)}|{re.escape(ITERATION)}|{re.escape(MANIFEST)})\.[0-9a-f]+\.partial")


def newest_first(root: Path, directory_format: str = STEP_FORMAT) -> list[Path]:
    """Return the step folders, the last saved one first; those without a readable manifest come before all others.

    The serial of the save decides, not the step number: a run that went back to step 5 and saved 6 continues from 6,
    even if an abandoned step 15 lies beside it.
    """
    if not root.is_dir():
        return []
    steps = []
    for folder in root.iterdir():
        step = step_of(folder.name, directory_format)
        if step is not None and folder.is_dir():
            serial = serial_of(folder)
            steps.append((float("inf") if serial is None else serial, step, folder))
    return [folder for _, _, folder in sorted(steps, reverse=True)]


def step_of(name: str, directory_format: str = STEP_FORMAT) -> int | None:
    """Return the number in a step folder's name; None for other names."""
    before, mark, after = directory_format.partition("{}")
    if not mark:
        raise ValueError(
            f"directory_format: {directory_format!r} has no {{}} in place of the step. Use {STEP_FORMAT!r}."
        )
    number = name[len(before) : len(name) - len(after)]
    fits = name == before + number + after and number.isascii() and number.isdecimal()
    return int(number) if fits else None


def manifest_of(folder: Path) -> Manifest | None:
    """Return the manifest of a step; None if it is missing or damaged."""
    try:
        return read_manifest(folder)
    except (ValueError, OSError):
        return None


def has_expected_sizes(folder: Path) -> bool:
    """Return whether all files of a step have the sizes in its manifest. Quick: contents are not compared."""
    manifest = manifest_of(folder)
    return manifest is not None and not damaged_files(folder, manifest, contents=False)


def serial_of(folder: Path) -> int | None:
    """Return the serial of a step's save, which grows with every save into its root; None without a manifest."""
    manifest = manifest_of(folder)
    return None if manifest is None else manifest.serial


def last_serial(root: Path) -> int:
    """Return the largest serial of the steps and fetched copies in `root`."""
    serials = [serial_of(folder) for folder in [*newest_first(root), *fetched_steps(root)]]
    return max((serial for serial in serials if serial is not None), default=0)


def bytes_of_newest(root: Path) -> int:
    """Return the size of the last saved step according to its manifest; 0 if there is none."""
    manifests = (manifest_of(folder) for folder in newest_first(root))
    newest = next((manifest for manifest in manifests if manifest is not None), None)
    return 0 if newest is None else newest.total_bytes


def bytes_of_all(root: Path) -> int:
    """Return the size of all steps according to their manifests."""
    return sum(manifest.total_bytes for folder in newest_first(root) if (manifest := manifest_of(folder)) is not None)


def fetched_steps(root: Path) -> list[Path]:
    """Return the steps that were copied from a remote in order to resume from them."""
    return [path.parent for path in (root / FETCHED).glob(f"*/*/{MANIFEST}")]


def temporary_path(root: Path, name: str, kind: str) -> Path:
    """Return a hidden path beside the steps; unique, since an earlier one may not have been deleted completely."""
    return root / f".{name}.{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def move_aside(root: Path) -> Path | None:
    """Move the steps of earlier runs into `before_<time>` in `root`, from which they can be resumed.

    Returns the new folder; None: there are no steps. Requires ownership of the folder.
    """
    if not newest_first(root):
        return None
    names = (LATEST, ITERATION, FETCHED, RECORD_FOLDER)
    # The steps last: after an interruption, the next call finds the remaining ones.
    paths = [
        *(root / name for name in names if (root / name).exists()),
        *root.glob("debug_step_*"),
        *newest_first(root),
    ]
    aside = root / f"before_{time.strftime('%Y%m%d-%H%M%S')}"
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-1")
    aside.mkdir()
    for path in paths:
        os.rename(path, aside / path.name)
    return aside


def clean_up(root: Path) -> None:
    """Complete or undo the unfinished work of killed processes. Requires the writer lock."""
    for leftover in [*root.glob(".*"), *root.glob(f"{STEP_FORMAT.format('*')}/.*")]:
        match = _LEFTOVER.fullmatch(leftover.name)
        if match and match["kind"] == "old" and not (root / match["step"]).exists():
            # Killed between the two renames with which a step replaces one of the same number.
            os.rename(leftover, root / match["step"])
        elif match:
            logger.info("removing %s, left by a run that was killed", leftover)
            # A worker that outlived its run may still write there; the next call deletes the rest.
            shutil.rmtree(leftover, ignore_errors=True)
        elif _PARTIAL.fullmatch(leftover.name):
            leftover.unlink(missing_ok=True)


# ---------------------------------------------------------------- locks and ownership

OWNER_FILE = ".owner"
_HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)
# Processes of a run that was just killed may still be dying.
_OWNER_TIMEOUT_S = 10.0

_guard = threading.Lock()
_writing: set[tuple[int, Path]] = set()


@contextmanager
def writer_lock(path: Path) -> Iterator[bool]:
    """Yield True to the only writer, False while another process, or another save of this one, writes.

    The lock belongs to the process (POSIX), and forked children do not hold it. It would end with the first file on
    `path` that this process closes: a second writer of this process does not open the file.
    """
    key = os.getpid(), path.resolve()
    with _guard:
        first = key not in _writing
        _writing.add(key)
    if not first:
        yield False
        return
    try:
        with path.open("ab") as file:
            yield _try_lock(fcntl.lockf, fcntl.LOCK_EX, file)
    finally:
        _writing.discard(key)


@contextmanager
def reader_lock(path: Path) -> Iterator[None]:
    """Protect the folder of `path` from deletion while it is read; any number of readers."""
    with path.open("rb") as file:
        # Between opening and locking it may have been moved away for deletion.
        if not _try_lock(fcntl.flock, fcntl.LOCK_SH, file) or not path.exists():
            raise FileNotFoundError(errno.ENOENT, "it is being deleted", str(path))
        yield


@contextmanager
def deleter_lock(path: Path) -> Iterator[bool]:
    """Yield whether no process holds a `reader_lock`; none can be taken inside the block."""
    with path.open("r+b") as file:
        yield _try_lock(fcntl.flock, fcntl.LOCK_EX, file)


def _try_lock(lock: Callable[[Any, int], object], kind: int, file: IO[bytes]) -> bool:
    """Return False if the lock is held elsewhere; True also on a file system without locks."""
    try:
        lock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            return False
        logger.debug("%s: no locks on this file system (%s); continuing without", file.name, error)
    return True


@dataclass(frozen=True)
class Owner:
    """The process that owns a folder."""

    host: str
    pid: int
    started: str
    birth: str
    """Start of the process in ticks of its system: distinguishes it from a later one with the same pid."""

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}, since {self.started}"


class FolderTakenError(ValueError):
    """The folder belongs to another run; `owner` identifies it, if known."""

    def __init__(self, folder: Path, owner: Owner | None) -> None:
        super().__init__(folder, owner)
        self.folder, self.owner = folder, owner

    def __str__(self) -> str:
        return f"{self.folder} belongs to another run ({self.owner or 'unknown owner'})"


class FolderOwnership:
    """Ownership of a folder until `close`. A second one in the same process shares it (a notebook's new trainer)."""

    # By folder: process id, open owner file, number of owners in this process. They share one open file, because
    # closing any other file on the same path would end the lock of the process.
    held: ClassVar[dict[Path, tuple[int, BinaryIO, int]]] = {}

    def __init__(self, folder: str | os.PathLike[str], timeout: float = _OWNER_TIMEOUT_S) -> None:
        """Create the folder if necessary and take it; FolderTakenError after `timeout` seconds."""
        path = Path(folder).absolute()
        path.mkdir(parents=True, exist_ok=True)
        self._path = path.resolve()
        self._closed = False
        pid, file, count = self.held.get(self._path, (0, None, 0))
        if file is None or pid != os.getpid():
            file, count = _take_folder(self._path, timeout), 0
        self.held[self._path] = (os.getpid(), file, count + 1)

    def close(self) -> None:
        """Release the folder; safe to call twice."""
        pid, file, count = self.held.get(self._path, (0, None, 0))
        if self._closed or file is None or pid != os.getpid():
            return
        self._closed = True
        if count > 1:
            self.held[self._path] = (pid, file, count - 1)
            return
        del self.held[self._path]
        file.truncate(0)
        file.close()


def read_owner(path: Path) -> Owner | None:
    """Return the owner in an owner file. Not to be called by the owner itself: closing the file ends its lock."""
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _take_folder(folder: Path, timeout: float) -> BinaryIO:
    path, deadline, warned = folder / OWNER_FILE, time.monotonic() + timeout, False
    path.touch()
    file = path.open("r+b", buffering=0)
    try:
        while not _lock_owner_file(file, path):
            owner = read_owner(path)
            if time.monotonic() >= deadline:
                raise FolderTakenError(folder, owner)
            if not warned:
                logger.warning("%s belongs to another run (%s); waiting %.0f s for its end", folder, owner, timeout)
                warned = True
            time.sleep(0.2)
        file.truncate(0)
        file.write(json.dumps(asdict(_this_process())).encode())
    except BaseException:
        file.close()
        raise
    return file


def _lock_owner_file(file: BinaryIO, path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            return False
        return not _is_alive_without_locks(read_owner(path), path, error)
    return True


def _is_alive_without_locks(owner: Owner | None, path: Path, error: OSError) -> bool:
    """Whether the owner in the file still runs, on a file system without locks."""
    this = _this_process()
    if owner is not None and owner.host == this.host:
        return owner.pid != this.pid and owner.birth == _birth(owner.pid)
    logger.warning(
        "%s: no locks on this file system (%s): two runs in one folder are not noticed across machines%s",
        path,
        error.strerror,
        f"; the last owner was {owner}" if owner else "",
    )
    return False


def _this_process() -> Owner:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return Owner(socket.gethostname(), os.getpid(), now, _birth(os.getpid()))


def _birth(pid: int) -> str:
    """Start of a process in ticks of its system; "" if there is no such process or it is not known."""
    try:
        # The second field, the name, may contain anything, also brackets and blanks.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
