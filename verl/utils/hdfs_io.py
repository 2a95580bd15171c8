"""Copy files, create folders and check paths on any file system of fsspec (`hdfs://`, `s3://`, …) and on local disk."""

from __future__ import annotations

import os
import posixpath
import shutil
from typing import Any

from verl.utils.fs import filesystem_of


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or folder exists at `path`."""
    fs, path_in_fs = filesystem_of(os.fspath(path))
    return bool(fs.exists(path_in_fs))


def makedirs(path: str | os.PathLike[str], exist_ok: bool = True) -> None:
    """Create a folder and its parents. If it exists: FileExistsError with `exist_ok=False`."""
    fs, path_in_fs = filesystem_of(os.fspath(path))
    fs.makedirs(path_in_fs, exist_ok=exist_ok)


def copy(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> str:
    """Copy a file or folder between any two file systems, as `cp -r` does; return the new path.

    Copies into `dst` if that is an existing folder or ends with a slash, else to the name `dst`. Empty subfolders are
    left out: object stores have none.
    """
    source_url, target_url = os.fspath(src), os.fspath(dst)
    source_fs, source = filesystem_of(source_url)
    target_fs, target = filesystem_of(target_url)
    source = source.rstrip("/")
    if not source_fs.exists(source):
        raise ValueError(f"src: {source_url!r} does not exist. Check the path.")
    if target_url.endswith("/") or target_fs.isdir(target):
        name = posixpath.basename(source)
        target, target_url = posixpath.join(target, name), posixpath.join(target_url, name)
    if source_fs is target_fs and _resolved(source_fs, source) == _resolved(target_fs, target):
        raise ValueError(f"dst: {target_url!r} is the same file or folder as src. Choose another path.")
    files = source_fs.find(source) if source_fs.isdir(source) else [source]
    if source_fs.isdir(source):
        target_fs.makedirs(target, exist_ok=True)
    for file in files:
        path = target + file[len(source) :]
        target_fs.makedirs(posixpath.dirname(path), exist_ok=True)
        with source_fs.open(file, "rb") as reader, target_fs.open(path, "wb") as writer:
            shutil.copyfileobj(reader, writer, length=16 * 2**20)
    return target_url


def _resolved(fs: Any, path: str) -> str:
    """Return the path without symlinks, which only local file systems have."""
    return os.path.realpath(path) if "file" in fs.protocol else path
