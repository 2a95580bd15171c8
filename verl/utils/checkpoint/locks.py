"""Locks on files that vanish with the process that holds them, so that a killed run leaves none behind."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)


_guard = threading.Lock()
_writing: set[tuple[int, Path]] = set()


@contextmanager
def writer_lock(path: Path) -> Iterator[bool]:
    """Be the only one that writes; yields False at once while another process, or another save of this one, does.

    The lock belongs to the process (POSIX), and its forked children do not hold it on. It would go with the first file
    on `path` that this process closes: who comes second here does not open it.
    """
    mine = os.getpid(), path.resolve()
    with _guard:
        first = mine not in _writing
        _writing.add(mine)
    if not first:
        yield False
        return
    try:
        with path.open("ab") as file:
            yield _taken(fcntl.lockf, fcntl.LOCK_EX, file)
    finally:
        _writing.discard(mine)


@contextmanager
def reader_lock(path: Path) -> Iterator[None]:
    """Keep the folder of `path` from being deleted while it is read; any number may read at once."""
    with path.open("rb") as file:
        # Between opening and locking it may have been moved away for deletion.
        if not _taken(fcntl.flock, fcntl.LOCK_SH, file) or not path.exists():
            raise FileNotFoundError(errno.ENOENT, "it is being deleted", str(path))
        yield


@contextmanager
def deleter_lock(path: Path) -> Iterator[bool]:
    """Yields whether nobody, in this process or another, holds a `reader_lock`; none can be taken inside."""
    with path.open("r+b") as file:
        yield _taken(fcntl.flock, fcntl.LOCK_EX, file)


def _taken(lock: Callable[[Any, int], object], kind: int, file: IO[bytes]) -> bool:
    """False: the lock is held elsewhere. True also where the file system has no locks: there is nothing to wait for."""
    try:
        lock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD_ELSEWHERE:
            return False
        logger.debug("%s: no locks on this file system (%s); going on without", file.name, error)
    return True
