"""Copies of steps on another file system (hdfs, s3, …) through fsspec: upload in the background, listing, moving.

Object stores cannot rename a folder, so the manifest is copied last: a copied step without one is incomplete.
"""

from __future__ import annotations

import logging
import posixpath
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from verl.utils.checkpoint.folders import ITERATION, manifest_of, newest_first, reader_lock, step_of
from verl.utils.checkpoint.manifest import LATEST, MANIFEST, Manifest, decode_manifest, read_manifest
from verl.utils.fs import filesystem_of
from verl.utils.progress import pulse

logger = logging.getLogger(__name__)

KEY = "trainer.default_hdfs_dir"
ATTEMPTS = 4
PAUSE_SECONDS = 1.0
"""Before the second attempt; doubled before each further one."""


def remote_steps(remote: str) -> list[str]:
    """Return the names of the step folders at `remote`: the one in its `latest` file first, then by step."""
    fs, inside = filesystem_of(remote, KEY)
    try:
        names = [posixpath.basename(str(name).rstrip("/")) for name in fs.ls(inside, detail=False)]
        steps = {name: step for name in names if (step := step_of(name)) is not None}
        latest = fs.cat_file(posixpath.join(inside, LATEST)).decode().strip() if LATEST in names else ""
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{KEY}: {remote!r} cannot be read: {error}. Check the address and your access.") from error
    return sorted(steps, key=lambda name: (name == latest, steps[name]), reverse=True)


def move_remote_aside(remote: str) -> str | None:
    """Move copied steps of an earlier run, and the files that name the latest one, into `before_<time>` at `remote`.

    Returns the URL of the new folder; None: there is nothing to move. If a move is interrupted, the next call moves
    the rest: the files that name the latest step are moved first, and also without steps. Object stores have no rename:
    fsspec copies and deletes every file, which takes as long as copying the steps did.
    """
    steps = remote_steps(remote)
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
    for entry in [*latest, *steps]:
        fs.mv(posixpath.join(inside, entry), posixpath.join(inside, name, entry), recursive=entry in steps)
    return posixpath.join(remote, name)


def read_remote_manifest(remote: str, name: str) -> Manifest | None:
    """Return the manifest of a copied step; None, with a warning, if it is missing or damaged."""
    fs, inside = filesystem_of(remote, KEY)
    try:
        return decode_manifest(fs.cat_file(posixpath.join(inside, name, MANIFEST)))
    except (FileNotFoundError, ValueError) as error:
        logger.warning("skipping %s/%s, which is incomplete or damaged: %s", remote, name, error)
        return None


def upload_step(folder: Path, remote: str) -> None:
    """Copy a complete step to `remote`; an older copy of the step is replaced."""
    fs, inside = filesystem_of(remote, KEY)
    target = posixpath.join(inside, folder.name)
    manifest = read_manifest(folder)
    if fs.exists(target):
        # The manifest first: without it the older copy counts as incomplete if this is interrupted.
        if fs.exists(posixpath.join(target, MANIFEST)):
            fs.rm_file(posixpath.join(target, MANIFEST))
        fs.rm(target, recursive=True)
    paths = {name: posixpath.join(target, name) for name in manifest.files}
    for parent in sorted({posixpath.dirname(path) for path in paths.values()}):
        fs.makedirs(parent, exist_ok=True)
    fs.put([str(folder / name) for name in paths], list(paths.values()))
    for name, path in paths.items():
        if (size := fs.size(path)) != manifest.files[name].size:
            raise OSError(f"{path} has {size} of {manifest.files[name].size} bytes after the upload")
    fs.put_file(str(folder / MANIFEST), posixpath.join(target, MANIFEST))
    fs.pipe_file(posixpath.join(inside, ITERATION), str(manifest.step).encode())
    fs.pipe_file(posixpath.join(inside, LATEST), folder.name.encode())
    logger.info("copied %s to %s", folder, remote)


class Uploader:
    """Copies steps to a remote in a background thread, oldest first: missing copies are always of the newest steps.

    A failed copy is tried a few times, logged, counted in `failed`, and tried again when the next step is added. The
    step that is being copied is protected from deletion; waiting ones are not.
    """

    def __init__(self, root: Path, remote: str, after_copy: Callable[[], None]) -> None:
        """`after_copy` is called after each copy, when its step is no longer read."""
        self._root, self._remote, self._after_copy = root, remote, after_copy
        self.failed = 0
        self._changed = threading.Condition()
        self._added = 0
        self._waiting: dict[Path, int] = {}  # in order, each with the number of its `add`
        self._remote_listed = False
        self._requested = self._running = False

    def add(self, folder: Path) -> None:
        """Add a complete step; failed copies are tried again too."""
        with self._changed:
            self._added += 1
            self._waiting.pop(folder, None)  # a step that replaces one of the same number is the newest
            self._waiting[folder] = self._added
        self._request_copies()

    def wait(self, timeout: float) -> list[str]:
        """Wait until all steps, also of earlier runs, are copied or have failed again, at most `timeout` seconds.

        Returns the names of steps without a copy.
        """
        deadline = time.monotonic() + timeout
        self._wait_for_thread(deadline)
        if (self._waiting or not self._remote_listed) and time.monotonic() < deadline:
            self._request_copies()
            self._wait_for_thread(deadline)
        with self._changed:
            return [folder.name for folder in self._waiting if folder.exists()]

    def _wait_for_thread(self, deadline: float) -> None:
        with self._changed:
            while self._running and time.monotonic() < deadline:
                self._changed.wait(timeout=min(10.0, max(0.0, deadline - time.monotonic())))
                pulse()  # a wait with its own timeout is not a hang

    def _request_copies(self) -> None:
        with self._changed:
            self._requested = True
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="checkpoint-copies", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._requested:
                    self._running = False
                    self._changed.notify_all()
                    return
                self._requested = False
            self._copy_all()

    def _copy_all(self) -> None:
        if not self._remote_listed:
            self._remote_listed = self._retry(self._add_missing_steps, "listing the steps")
        while self._remote_listed:
            with self._changed:
                folder, number = next(iter(self._waiting.items()), (None, 0))
            if folder is None:
                return
            if not self._retry(partial(self._copy, folder), f"copying {folder}"):
                with self._changed:
                    missing = ", ".join(other.name for other in self._waiting)
                logger.error("%s: only local for now: %s. The next save tries again.", KEY, missing)
                return
            with self._changed:
                if self._waiting[folder] == number:  # else it was replaced meanwhile
                    del self._waiting[folder]
            self._after_copy()

    def _copy(self, folder: Path) -> None:
        try:
            with reader_lock(folder / MANIFEST):
                upload_step(folder, self._remote)
        except FileNotFoundError:
            if (folder / MANIFEST).exists():
                raise
            logger.warning("%s: %s was over the limit and was deleted before it was copied", KEY, folder)

    def _add_missing_steps(self) -> None:
        """Add local steps that were saved after the newest complete one at the remote."""
        manifests = (read_remote_manifest(self._remote, name) for name in remote_steps(self._remote))
        newest = next((manifest.serial for manifest in manifests if manifest is not None), 0)
        local = {folder: manifest_of(folder) for folder in reversed(newest_first(self._root))}
        missing = [
            folder
            for folder, manifest in local.items()
            if manifest is not None and manifest.serial > newest and not manifest.dropped
        ]
        with self._changed:
            self._waiting = {**dict.fromkeys(missing, 0), **self._waiting}

    def _retry(self, action: Callable[[], None], description: str) -> bool:
        """Call `action` until it succeeds, at most `ATTEMPTS` times; return whether it did."""
        pause = PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                action()
                return True
            except Exception as error:  # noqa: BLE001 - file systems raise any type; the local step is safe
                summary = f"{KEY}: {description} to {self._remote} failed ({attempt} of {ATTEMPTS})"
                logger.warning("%s: %s: %s", summary, type(error).__name__, error)
            if attempt < ATTEMPTS:
                time.sleep(pause)
                pause *= 2
        self.failed += 1
        return False
