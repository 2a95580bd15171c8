"""Copies of steps on another file system (hdfs, s3, …) through fsspec.

Such stores cannot rename a folder, so the manifest travels last: a copied step without one is not finished.
"""

from __future__ import annotations

import logging
import posixpath
import time
from collections.abc import Callable
from pathlib import Path

from verl.utils.checkpoint.manifest import LATEST, MANIFEST, Manifest, decode_manifest, read_manifest
from verl.utils.fs import filesystem_of

logger = logging.getLogger(__name__)

KEY = "trainer.default_hdfs_dir"
ITERATION = "latest_checkpointed_iteration.txt"


def newest_first(remote: str, step_of: Callable[[str], int | None]) -> list[str]:
    """Names of the step folders at `remote`: the one its `latest` names, then by step. [] where nothing is there."""
    fs, inside = filesystem_of(remote, KEY)
    try:
        found = [posixpath.basename(str(name).rstrip("/")) for name in fs.ls(inside, detail=False)]
        steps = {name: step for name in found if (step := step_of(name)) is not None}
        latest = fs.cat_file(posixpath.join(inside, LATEST)).decode().strip() if LATEST in found else ""
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{KEY}: {remote!r} cannot be read: {error}. Check the address and your access.") from error
    return sorted(steps, key=lambda name: (name == latest, steps[name]), reverse=True)


def move_aside(remote: str, step_of: Callable[[str], int | None]) -> str | None:
    """Move copied steps of an earlier run, and the files that name the latest one, into `before_<time>` at `remote`.

    Returns the URL of the new folder; None: there is nothing to move. If a move is interrupted, the next call moves
    the rest: the files that name the latest step are moved first, and also without steps. Object stores have no rename:
    fsspec copies and deletes every file, which takes as long as copying the steps did.
    """
    steps = newest_first(remote, step_of)
    fs, inside = filesystem_of(remote, KEY)
    latest = [file for file in (LATEST, ITERATION) if fs.exists(posixpath.join(inside, file))]
    if not steps and not latest:
        return None
    name = f"before_{time.strftime('%Y%m%d-%H%M%S')}"
    while fs.exists(posixpath.join(inside, name)):
        name = f"{name}-1"
    fs.makedirs(posixpath.join(inside, name))
    size = sum(fs.du(posixpath.join(inside, step)) for step in steps)
    logger.warning(
        "%s: moving %d steps of an earlier run (%.2f GB) to %s. Object stores copy every byte: this may take a while.",
        *(KEY, len(steps), size / 2**30, posixpath.join(remote, name)),
    )
    for moved in [*latest, *steps]:
        fs.mv(posixpath.join(inside, moved), posixpath.join(inside, name, moved), recursive=moved in steps)
    return posixpath.join(remote, name)


def read_remote_manifest(remote: str, name: str) -> Manifest | None:
    """The manifest of a copied step; None, and a warning, where it is missing or damaged."""
    fs, inside = filesystem_of(remote, KEY)
    try:
        return decode_manifest(fs.cat_file(posixpath.join(inside, name, MANIFEST)))
    except (FileNotFoundError, ValueError) as error:
        logger.warning("%s/%s is not whole and is passed over: %s", remote, name, error)
        return None


def upload_step(folder: Path, remote: str) -> None:
    """Copy a whole step to `remote`, in place of an older copy of it."""
    fs, inside = filesystem_of(remote, KEY)
    target = posixpath.join(inside, folder.name)
    manifest = read_manifest(folder)
    if fs.exists(target):
        # Without its manifest an older copy of this step is unfinished, whatever else is interrupted here.
        if fs.exists(posixpath.join(target, MANIFEST)):
            fs.rm_file(posixpath.join(target, MANIFEST))
        fs.rm(target, recursive=True)
    paths = {name: posixpath.join(target, name) for name in manifest.files}
    for parent in sorted({posixpath.dirname(path) for path in paths.values()}):
        fs.makedirs(parent, exist_ok=True)
    fs.put([str(folder / name) for name in paths], list(paths.values()))
    for name, path in paths.items():
        if (arrived := fs.size(path)) != manifest.files[name].size:
            raise OSError(f"{path} arrived with {arrived} of {manifest.files[name].size} bytes")
    fs.put_file(str(folder / MANIFEST), posixpath.join(target, MANIFEST))
    fs.pipe_file(posixpath.join(inside, ITERATION), str(manifest.step).encode())
    fs.pipe_file(posixpath.join(inside, LATEST), folder.name.encode())
    logger.info("copied %s to %s", folder, remote)
