"""Copier: steps are copied to a remote in a thread of its own, oldest first, while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from verl.utils.checkpoint import remote as copies
from verl.utils.checkpoint.locks import reader_lock
from verl.utils.checkpoint.manifest import MANIFEST
from verl.utils.checkpoint.steps import manifest_of, newest_first, step_of
from verl.utils.progress import pulse

logger = logging.getLogger(__name__)

_ATTEMPTS = 4
_PAUSE_SECONDS = 1.0
"""Before the second attempt; twice as long before each further one."""


class Copier:
    """Copies in order, so those that are missing at `remote` are always the newest ones.

    One that fails is tried a few times, said, counted in `failed`, and tried again when the next step is added. The
    step that is being copied is not deleted; others may be, however far behind the copies are.
    """

    def __init__(self, root: Path, remote: str, after_copy: Callable[[], None]) -> None:
        """`after_copy` is called when a step is being read no more."""
        self._root, self._remote, self._after_copy = root, remote, after_copy
        self.failed = 0
        self._changed = threading.Condition()
        self._added = 0
        self._waiting: dict[Path, int] = {}  # in order, each with the number of its `add`
        self._knows_remote = False
        self._asked = self._runs = False

    def add(self, folder: Path) -> None:
        """A new whole step; also a reason to try again what failed."""
        with self._changed:
            self._added += 1
            self._waiting.pop(folder, None)  # one that replaces a step of the same number is the newest
            self._waiting[folder] = self._added
        self._ask()

    def wait(self, timeout: float) -> list[str]:
        """Until all is copied, what earlier runs left too, or has failed again: names of steps without a copy then."""
        deadline = time.monotonic() + timeout
        self._wait_for_thread(deadline)
        if (self._waiting or not self._knows_remote) and time.monotonic() < deadline:
            self._ask()
            self._wait_for_thread(deadline)
        with self._changed:
            return [folder.name for folder in self._waiting if folder.exists()]

    def _wait_for_thread(self, deadline: float) -> None:
        with self._changed:
            while self._runs and time.monotonic() < deadline:
                self._changed.wait(timeout=min(10.0, max(0.0, deadline - time.monotonic())))
                pulse()  # a wait with a limit of its own is no hang

    def _ask(self) -> None:
        with self._changed:
            self._asked = True
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="checkpoint-copies", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._asked:
                    self._runs = False
                    self._changed.notify_all()
                    return
                self._asked = False
            self._copy_all()

    def _copy_all(self) -> None:
        if not self._knows_remote:
            self._knows_remote = self._tried(self._add_what_earlier_runs_left, "finding what is missing there")
        while self._knows_remote:
            with self._changed:
                folder, number = next(iter(self._waiting.items()), (None, 0))
            if folder is None:
                return
            if not self._tried(partial(self._copy, folder), f"copying {folder}"):
                with self._changed:
                    missing = ", ".join(other.name for other in self._waiting)
                logger.error("%s: only local for now: %s. The next save tries again.", copies.KEY, missing)
                return
            with self._changed:
                if self._waiting[folder] == number:  # else it was replaced meanwhile
                    del self._waiting[folder]
            self._after_copy()

    def _copy(self, folder: Path) -> None:
        try:
            with reader_lock(folder / MANIFEST):
                copies.upload_step(folder, self._remote)
        except FileNotFoundError:
            if (folder / MANIFEST).exists():
                raise
            logger.warning("%s: %s was deleted, as others over the limit, before it was copied", copies.KEY, folder)

    def _add_what_earlier_runs_left(self) -> None:
        """Steps saved after the newest one that is whole at the remote."""
        names = copies.newest_first(self._remote, step_of)
        found = (copies.read_remote_manifest(self._remote, name) for name in names)
        newest = next((manifest.serial for manifest in found if manifest is not None), 0)
        manifests = {folder: manifest_of(folder) for folder in reversed(newest_first(self._root))}
        left = [
            folder
            for folder, manifest in manifests.items()
            if manifest is not None and manifest.serial > newest and not manifest.dropped
        ]
        with self._changed:
            self._waiting = {**dict.fromkeys(left, 0), **self._waiting}

    def _tried(self, act: Callable[[], None], what: str) -> bool:
        pause = _PAUSE_SECONDS
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                act()
                return True
            except Exception as error:  # noqa: BLE001 - file systems raise what they like; the local step is safe
                said = f"{copies.KEY}: {what} to {self._remote} failed ({attempt} of {_ATTEMPTS})"
                logger.warning("%s: %s: %s", said, type(error).__name__, error)
            if attempt < _ATTEMPTS:
                time.sleep(pause)
                pause *= 2
        self.failed += 1
        return False
