"""Locks on files that vanish with the process that holds them, so that a killed run leaves none behind."""

from __future__ import annotations

import errno
import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)


@contextmanager
def writer_lock(path: Path) -> Iterator[bool]:
    """Be the only process that writes; yields False at once while another does.

    The lock belongs to the process (POSIX): its forked children do not hold it on, and an abandoned save of this very
    process does not lock out the next.
    """
    with path.open("ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield _unsupported(path, error)
        else:
            yield True


@contextmanager
def reader_lock(path: Path) -> Iterator[None]:
    """Keep the folder of `path` from being deleted while it is read; any number may read at once."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if not _unsupported(path, error):
                raise FileNotFoundError(errno.ENOENT, "it is being deleted", str(path)) from error
        # Between opening and locking it may have been moved away for deletion.
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "it was deleted", str(path))
        yield


@contextmanager
def deleter_lock(path: Path) -> Iterator[bool]:
    """Yields whether nobody, in this process or another, holds a `reader_lock`; none can be taken inside."""
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield _unsupported(path, error)
        else:
            yield True


def _unsupported(path: Path, error: OSError) -> bool:
    """False: the lock is held elsewhere. True: this file system has no locks, so there is nothing to wait for."""
    if error.errno in _HELD_ELSEWHERE:
        return False
    logger.debug("%s: no locks on this file system (%s); going on without", path, error)
    return True
