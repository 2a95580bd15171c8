"""Folder of compiled kernels and tuning decisions, shared by all runs and processes of a user.

It is `compiled/<versions>` below $VERL_CACHE (`~/.cache/verl`). Within it, Inductor and Triton name their entries by
device, shapes, settings and source code, and write each file in one atomic step. The folder contains executable code,
so it must belong to the user alone. `open_compile_cache` removes folders above the size limit, and a folder with a
damaged file: its kernels are compiled again.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from verl.utils.fs import cache_root

logger = logging.getLogger(__name__)

MAX_BYTES = 10 * 2**30
"""Size limit of the folders of all versions together."""
# Environment variables of the caches, and their folders.
_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_MANIFEST = "manifest.json"
# Files and folders of entries that may be rewritten, and whose content Inductor checks when it reads them.
_REWRITTEN, _CHECKED = (".lock", ".best_config", ".autotune.json"), ("aotautograd", "fxgraph", "locks")
# Locks of the folders that this process uses; they are held until it ends.
locks: dict[str, IO[bytes]] = {}


def open_compile_cache(max_bytes: int = MAX_BYTES) -> Path | None:
    """Make Inductor and Triton use the folder, except where the user has set another one; return the folder.

    Returns None if the user has set both, or if the folder cannot be used: the reason is then logged, and the caches
    have their default places. To be called before anything is compiled; repeated calls have no effect. Safe for
    concurrent processes: the folder is checked and cleared only while no other process uses it.
    """
    variables = {name: folder for name, folder in _VARIABLES.items() if not _is_set(name)}
    if not variables:
        return None
    root = cache_root() / "compiled"
    folder = root / _versions()
    try:
        _create_private(root)
        if folder.name not in locks:
            locks[folder.name] = _lock_and_check(folder, max_bytes)
            _remove_other_versions(root, folder.name, max_bytes)
    except OSError as error:  # a full or read-only disk, or a file system without locks, only costs time
        logger.warning("compiled kernels are not kept in %s: %s", folder, error)
        return None
    for name, part in variables.items():
        os.environ[name] = str(folder / part)
    return folder


def _is_set(name: str) -> bool:
    """Whether the user has set this variable. Importing the compiler sets it to torch's default place."""
    value = os.environ.get(name)
    return bool(value) and value != _torch_default()


def _torch_default() -> str:
    """Return the folder that torch 2.13 uses (`torch._inductor.runtime.cache_dir_utils`), without importing it."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # a user without a name
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _versions() -> str:
    """Return the name of the folder: a hash of all versions on which the usability of compiled code depends."""
    packages = [f"{name} {_version_of(name)}" for name in ("torch", "triton")]
    text = " ".join([platform.python_version(), platform.machine(), platform.libc_ver()[1], *packages])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _create_private(root: Path) -> None:
    """Create the folder for this user alone. Raises PermissionError if others could write to it."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{root} must belong to this user and not be writable for others (chmod 700)")


def _lock_and_check(folder: Path, max_bytes: int) -> IO[bytes]:
    """Return the open file with a shared lock on the folder. If no other process uses the folder, check it first."""
    lock = folder.with_suffix(".lock").open("ab")
    try:
        if _try_exclusive(lock):
            _check(folder, max_bytes)
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(lock.fileno())  # the time of last use
    except OSError:
        lock.close()
        raise
    return lock


def _try_exclusive(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check(folder: Path, max_bytes: int) -> None:
    """Remove the folder if it is too large, or if a file that the manifest lists has changed; then update the manifest.

    New files are added: Inductor and Triton write them atomically, so that those of a killed process are complete.
    """
    known = _read_manifest(folder)
    digests = {str(path.relative_to(folder)): _digest(path) for path in _files(folder)}
    changed = sorted(name for name, digest in known.items() if digests.get(name, digest) != digest)
    if changed:
        logger.warning("compiled kernels: %s is damaged; all are compiled again", folder / changed[0])
    if changed or _size(folder) > max_bytes:
        shutil.rmtree(folder)
        digests = {}
    folder.mkdir(mode=0o700, exist_ok=True)
    temporary = folder / f".{uuid.uuid4().hex[:8]}"
    temporary.write_text(json.dumps(digests))
    os.replace(temporary, folder / _MANIFEST)


def _read_manifest(folder: Path) -> dict[str, str]:
    try:
        content = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError):  # absent or damaged: all files count as new
        return {}
    return content if isinstance(content, dict) else {}


def _files(folder: Path) -> Sequence[Path]:
    """Return the files that are executed as they are: they are never rewritten."""
    return [
        path
        for name in _VARIABLES.values()
        for path in sorted((folder / name).rglob("*"))
        if path.is_file() and not path.name.endswith(_REWRITTEN) and not set(_CHECKED) & set(path.parts)
    ]


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _remove_other_versions(root: Path, current: str, max_bytes: int) -> None:
    """Remove other folders that no process uses, least recently used first, until the total is at most `max_bytes`."""
    lock_paths = sorted(root.glob("*.lock"), key=lambda path: path.stat().st_mtime)
    sizes = {path.stem: _size(root / path.stem) for path in lock_paths}
    for path in lock_paths:
        if sum(sizes.values()) <= max_bytes:
            return
        if path.stem == current:
            continue
        with path.open("ab") as lock:
            if _try_exclusive(lock):
                shutil.rmtree(root / path.stem, ignore_errors=True)
                sizes[path.stem] = 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
