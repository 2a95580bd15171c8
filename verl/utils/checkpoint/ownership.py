"""A folder of checkpoints belongs to one run from its start to its end.

The owner holds a lock on `.owner` in the folder, which also says who it is. The lock is POSIX's: it ends with the
process, however that ends, is not inherited by forked children, and works over NFS. On a file system without locks,
which the log says, an owner on the same machine is still known by its process.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, ClassVar

from verl.utils.checkpoint.locks import HELD_ELSEWHERE

logger = logging.getLogger(__name__)

OWNER = ".owner"

# A run that was killed a moment ago may have processes that are still dying.
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Owner:
    """Who holds a folder."""

    host: str
    pid: int
    started: str
    birth: str
    """When the process began, as its system counts: tells it from a later one of the same number."""

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}, since {self.started}"


class FolderTakenError(ValueError):
    """The folder belongs to another run; `owner` says which, where it is known."""

    def __init__(self, folder: Path, owner: Owner | None) -> None:
        super().__init__(folder, owner)
        self.folder, self.owner = folder, owner

    def __str__(self) -> str:
        return f"{self.folder} belongs to another run ({self.owner or 'which does not say who it is'})"


class Ownership:
    """Of a folder, until `close`. A second one in the same process shares it: notebooks make a trainer again."""

    # The lock of a process goes with the first of its files on the locked one that is closed, so there is only one.
    _held: ClassVar[dict[Path, tuple[int, BinaryIO, int]]] = {}

    def __init__(self, folder: str | os.PathLike[str], patience: float = _PATIENCE_SECONDS) -> None:
        """Make the folder, if need be, and take it; FolderTakenError after `patience` seconds."""
        path = Path(folder).absolute()
        path.mkdir(parents=True, exist_ok=True)
        self._path = path.resolve()
        self._closed = False
        pid, file, count = self._held.get(self._path, (0, None, 0))
        if file is None or pid != os.getpid():
            file, count = _locked(self._path, patience), 0
        self._held[self._path] = (os.getpid(), file, count + 1)

    def close(self) -> None:
        """Give the folder back; safe to call twice."""
        pid, file, count = self._held.get(self._path, (0, None, 0))
        if self._closed or file is None or pid != os.getpid():
            return
        self._closed = True
        if count > 1:
            self._held[self._path] = (pid, file, count - 1)
            return
        del self._held[self._path]
        file.truncate(0)
        file.close()


def _locked(folder: Path, patience: float) -> BinaryIO:
    path, deadline, said = folder / OWNER, time.monotonic() + patience, False
    path.touch()
    file = path.open("r+b", buffering=0)
    try:
        while not _lock(file, path):
            owner = read_owner(path)
            if time.monotonic() >= deadline:
                raise FolderTakenError(folder, owner)
            if not said:
                logger.warning("%s belongs to another run (%s); waiting %.0f s for its end", folder, owner, patience)
                said = True
            time.sleep(0.2)
        file.truncate(0)
        file.write(json.dumps(asdict(_this_process())).encode())
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: BinaryIO, path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD_ELSEWHERE:
            return False
        return not _lives_without_locks(read_owner(path), path, error)
    return True


def _lives_without_locks(owner: Owner | None, path: Path, error: OSError) -> bool:
    """Whether the owner that the file names runs, where there are no locks to ask."""
    me = _this_process()
    if owner is not None and owner.host == me.host:
        return owner.pid != me.pid and owner.birth == _birth(owner.pid)
    logger.warning(
        "%s: no locks on this file system (%s), so two runs in one folder are not noticed across machines%s",
        path,
        error.strerror,
        f"; the last was {owner}" if owner else "",
    )
    return False


def read_owner(path: Path) -> Owner | None:
    """Who says to hold the folder of this file. (The owner's own process must not ask: see `Ownership`.)"""
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _this_process() -> Owner:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return Owner(socket.gethostname(), os.getpid(), now, _birth(os.getpid()))


def _birth(pid: int) -> str:
    """The start of a process in its system's ticks; "" where there is no such process, or no way to know."""
    try:
        # The second field, its name, may hold anything, also brackets and blanks.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
