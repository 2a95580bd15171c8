"""Which files are opened for reading: proof that something was not read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_listeners: list[tuple[Path, list[Path]]] = []


@contextmanager
def files_read(under: str | os.PathLike[str]) -> Iterator[list[Path]]:
    """A list that grows with every file below `under` that this process opens to read, in any thread."""
    _listen()
    listener: tuple[Path, list[Path]] = (Path(under), [])
    _listeners.append(listener)
    try:
        yield listener[1]
    finally:
        _listeners.remove(listener)


@cache
def _listen() -> None:
    sys.addaudithook(_note)  # once: there is no removing one


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _listeners or isinstance(arguments[0], int):
        return
    path, flags = Path(os.fsdecode(arguments[0])), arguments[2]
    if flags & os.O_ACCMODE != os.O_WRONLY and not path.is_dir():
        for under, found in _listeners:
            if under in path.parents:
                found.append(path)
