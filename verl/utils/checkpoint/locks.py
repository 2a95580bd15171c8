"""Locks on files that vanish with the process that holds them, so that a killed run leaves none behind."""

from __future__ import annotations

import errno
import fcntl
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)


@contextmanager
def writer_lock(path: Path) -> Iterator[bool]:
    """Be the only process that writes; yields False at once while another does.

    The lock belongs to the process (POSIX): its forked children do not hold it on, and an abandoned save of this very
    process does not lock out the next.
    """
    with path.open("ab") as file:
        yield _taken(fcntl.lockf, fcntl.LOCK_EX, file)


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
