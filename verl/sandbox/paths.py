"""Names of files that are placed in a program's directory, or fetched from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

_MOST_PATHS, _LONGEST_PATH, _LONGEST_NAME = 1024, 1024, 255


def check_paths(placed: Iterable[str], fetch: Sequence[str]) -> None:
    """ValueError for names of files that cannot be placed in, or fetched from, a program's directory."""
    names = list(placed)
    if len(names) + len(fetch) > _MOST_PATHS:
        raise ValueError(f"sandbox files: {len(names) + len(fetch)} names are more than {_MOST_PATHS}")
    for path in (*names, *fetch):
        _check_path(path)
    folders = {os.path.normpath(path) for path in names}
    for path in names:
        inner = os.path.dirname(os.path.normpath(path))
        while inner:
            if inner in folders:
                raise ValueError(f"sandbox file {_shown(path)}: another file has the name of its folder")
            inner = os.path.dirname(inner)


def _check_path(path: str) -> None:
    problem = None
    try:
        parts = path.encode().split(b"/")
    except UnicodeEncodeError:
        problem = "it has characters that no file name can have"
    else:
        if not path or path.startswith("/") or b".." in parts or "\0" in path or os.path.normpath(path) == ".":
            problem = "a path inside the program's directory is needed, without '..'"
        elif path.endswith("/"):
            problem = "it is the name of a folder"
        elif len(path.encode()) > _LONGEST_PATH or max(map(len, parts)) > _LONGEST_NAME:
            problem = f"the path is longer than {_LONGEST_PATH} bytes, or one of its parts than {_LONGEST_NAME} bytes"
    if problem is not None:
        raise ValueError(f"sandbox file {_shown(path)}: {problem}")


def _shown(path: str) -> str:
    return repr(path if len(path) <= 100 else path[:100] + "…")
