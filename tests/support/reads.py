"""Record the files that this process opens for reading."""

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
    """Yield a list to which every file below `under` is added that this process opens for reading, in any thread."""
    _install_hook()
    listener: tuple[Path, list[Path]] = (Path(under), [])
    _listeners.append(listener)
    try:
        yield listener[1]
    finally:
        _listeners.remove(listener)


@cache
def _install_hook() -> None:
    sys.addaudithook(_on_event)  # cached: audit hooks cannot be removed


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _listeners or isinstance(arguments[0], int):
        return
    path, flags = Path(os.fsdecode(arguments[0])), arguments[2]
    if flags & os.O_ACCMODE != os.O_WRONLY and not path.is_dir():
        for under, files in _listeners:
            if under in path.parents:
                files.append(path)
