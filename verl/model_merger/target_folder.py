"""A folder that is there whole or not at all: written beside, and renamed into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.utils.checkpoint.locks import writer_lock
from verl.utils.checkpoint.manifest import sync_folder

_LOCK = ".merging"


def check_target(target: Path, source: Path, overwrite: bool) -> None:
    """ValueError where something is in the way."""
    if target == source or target in source.parents:
        raise ValueError(f"--target_dir: {target} is, or holds, the checkpoint itself. Give another folder.")
    if target.exists() and not target.is_dir():
        raise ValueError(f"--target_dir: {target} is a file. Give a folder.")
    if os.path.ismount(target):
        raise ValueError(f"--target_dir: {target} is a mount point, which cannot be renamed. Give a folder in it.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ValueError(f"--target_dir: {target} is not empty. Give another folder, or --overwrite.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `target` when the block ends, and goes if it fails.

    What a killed process left of one is removed first; ValueError while another process writes one.
    """
    work, old = (target.with_name(f".{target.name}.{word}") for word in ("unfinished", "replaced"))
    work.mkdir(parents=True, exist_ok=True)
    with writer_lock(work / _LOCK) as alone:
        if not alone:
            raise ValueError(f"--target_dir: another process is writing {target}. Wait for it, or give another folder.")
        try:
            _empty(work)
            yield work
            (work / _LOCK).unlink()
            sync_folder(work)
            if target.is_dir() and any(target.iterdir()):
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            work.rename(target)
            sync_folder(target.parent)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
