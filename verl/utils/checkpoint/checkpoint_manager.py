"""The folders of a run's checkpoints: `global_step_N/` is written beside, checked, and renamed into place.

Killed at any moment, a run leaves the steps it had, or those and the new one; never half a step under a step's name.
What starts with a dot in the root is work in progress and may be deleted when no process is saving.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verl.utils.checkpoint import remote as copies
from verl.utils.checkpoint.copier import Copier
from verl.utils.checkpoint.locks import reader_lock, writer_lock
from verl.utils.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    ChecksumRecorder,
    expect_records,
    expects_records,
    find_problems,
    write_manifest,
)
from verl.utils.checkpoint.retention import WHOLE, retire
from verl.utils.checkpoint.steps import (
    FETCHED,
    LOCK,
    STEP_FORMAT,
    hidden,
    last_serial,
    newest_first,
    serial_of,
    step_of,
    tidy,
)
from verl.utils.disk import sync_folder, write_durably
from verl.utils.fs import copy_to_local, expand_path, filesystem_of

__all__ = ["CheckpointManager", "ChecksumRecorder", "find_latest_ckpt_path", "reading", "resolve_resume"]

logger = logging.getLogger(__name__)


def find_latest_ckpt_path(path: str | os.PathLike[str] | None, directory_format: str = STEP_FORMAT) -> str | None:
    """The newest whole step under `path`, or None. Newest is the one saved last; every file is checked."""
    if path is None:
        return None
    found, _ = _newest_whole(Path(expand_path(path)), directory_format)
    return None if found is None else str(found)


def resolve_resume(
    mode: str,
    root: str | os.PathLike[str],
    resume_from_path: str | os.PathLike[str] | None = None,
    remote: str | None = None,
) -> Path | None:
    """The step to continue from, checked file by file, or None to begin anew.

    `auto`: the newest whole step of `root` or of its copies at `remote`. `disable`: none. `resume_path`: the one at
    `resume_from_path`, a folder or URL. Copies are fetched into `root`, where all nodes of a run see them.
    """
    if mode == "disable":
        return None
    folder = Path(expand_path(root)).absolute()
    if mode == "auto":
        return _resume_newest(folder, remote)
    if mode == "resume_path":
        return _resume_from(resume_from_path, folder)
    raise ValueError(f"trainer.resume_mode: {mode!r} is unknown. Use auto, disable or resume_path.")


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Retention, of this process or another, does not delete the step while this is open."""
    with reader_lock(Path(path) / MANIFEST):
        yield Path(path)


class CheckpointManager:
    """Saves steps into `root`: `folder = begin(step)`, all workers write into it, `commit(step)`; or `abandon()`.

    `max_to_keep` limits the local steps (None: no limit), or each part of them by its own: {"actor": 3, "critic": 1}
    leaves the newest three with their folder `actor/` and the newest alone with `critic/`; only steps that have all
    their parts are whole. `remote`, a path or URL, gets a copy of each step, without limit and in the background:
    `copies` knows how far that is.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        max_to_keep: int | Mapping[str, int | None] | None = None,
        remote: str | None = None,
    ) -> None:
        self._limits = dict(max_to_keep) if isinstance(max_to_keep, Mapping) else {WHOLE: max_to_keep}
        for part, limit in self._limits.items():
            if limit is not None and limit < 1:
                key = "max_ckpt_to_keep" if part == WHOLE else f"max_{part}_ckpt_to_keep"
                raise ValueError(f"trainer.{key}: {limit} would keep no step. Use 1 or more, or null for all.")
        self.root = Path(expand_path(root)).absolute()
        self.copies: Copier | None = None
        if remote is not None:
            filesystem_of(remote, copies.KEY)
            self.copies = Copier(self.root, remote, self._retire)
        self._open: tuple[int, Path] | None = None
        self._newest: Path | None = None
        self._lock = ExitStack()
        self._retiring = threading.Lock()

    def begin(self, step: int) -> Path:
        """An empty folder for the files of `step`, on the file system they will stay on."""
        if step < 0:
            raise ValueError(f"step: {step} is negative. Steps count from 0.")
        if self._open is not None:
            raise ValueError(f"step: begin({step}) while {self._open[0]} is being written. Commit or abandon it first.")
        self.root.mkdir(parents=True, exist_ok=True)
        if not self._lock.enter_context(writer_lock(self.root / LOCK)):
            self._lock.close()
            raise ValueError(
                f"trainer.default_local_dir: another process (or trainer of this one) is saving into {self.root}. "
                "Give each run a folder of its own (trainer.experiment_name is part of the default)."
            )
        tidy(self.root)
        folder = hidden(self.root, STEP_FORMAT.format(step), "tmp")
        expect_records(folder)
        self._open = (step, folder)
        return folder

    def commit(self, step: int) -> Path:
        """Make what was written since `begin(step)` the newest step, delete steps over the limit, begin to copy."""
        if self._open is None or self._open[0] != step:
            raise ValueError(f"step: commit({step}) without begin({step}). Write into the folder that begin returns.")
        folder, target = self._open[1], self.root / STEP_FORMAT.format(step)
        if not expects_records(folder):
            raise FileNotFoundError(errno.ENOENT, f"step {step} was deleted while it was being written", str(folder))
        write_manifest(folder, step, serial=1 + last_serial(self.root))
        replaced = None
        if target.exists():
            replaced = hidden(self.root, target.name, "old")
            os.rename(target, replaced)
        os.rename(folder, target)
        sync_folder(self.root)
        write_durably(self.root / copies.ITERATION, str(step).encode())
        write_durably(self.root / LATEST, target.name.encode())
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._open, self._newest = None, target
        if self.copies is not None:
            self.copies.add(target)
        self._retire()
        self._lock.close()
        return target

    def abandon(self) -> None:
        """Delete what was written since `begin`: the save failed, and its space is wanted."""
        if self._open is not None:
            shutil.rmtree(self._open[1], ignore_errors=True)
            self._open = None
        self._lock.close()

    def _retire(self) -> None:
        """After a save; and after a copy, since a step that was being copied stayed meanwhile.

        What could not be deleted costs neither the step that was saved nor the copies: the next save tries again.
        """
        if self._newest is not None:
            with self._retiring:
                try:
                    retire(self.root, self._newest, self._limits)
                except OSError as error:
                    logger.warning("%s: steps over the limit could not be deleted: %s", self.root, error)

    @staticmethod
    def verify(path: str | os.PathLike[str]) -> list[str]:
        """What keeps the step at `path` from being whole, one line per missing, truncated or damaged file."""
        return find_problems(Path(path))


def _resume_newest(root: Path, remote: str | None) -> Path | None:
    if os.access(root, os.W_OK):
        with writer_lock(root / LOCK) as alone:
            if alone:  # no process is saving right now: what is unfinished was left by killed runs
                tidy(root)
    local, rejected = _newest_whole(root, STEP_FORMAT)
    if remote is not None:
        known = -1 if local is None else serial_of(local)
        fetched = _fetch_newer(remote, root, -1 if known is None else known)
        if fetched is not None:
            return fetched
    if local is None and rejected:
        listed = "; ".join(f"{folder.name}: {_summary(problems)}" for folder, problems in rejected)
        raise ValueError(
            f"trainer.resume_mode: auto finds steps in {root}, but none is whole ({listed}). Restore the files, or"
            " start from scratch with trainer.resume_mode=disable, which moves them into before_<time>."
        )
    return local


def _fetch_newer(remote: str, root: Path, serial: int) -> Path | None:
    """A local copy of the newest whole step at `remote` saved after `serial`."""
    for name in copies.newest_first(remote, step_of):
        manifest = copies.read_remote_manifest(remote, name)
        if manifest is None:
            continue
        if manifest.serial <= serial:
            return None
        path = Path(copy_to_local(f"{remote.rstrip('/')}/{name}", root / FETCHED, key=copies.KEY))
        problems = find_problems(path)
        if not problems:
            return path
        logger.warning("%s/%s is not whole and is passed over: %s", remote, name, _summary(problems))
    return None


def _resume_from(given: str | os.PathLike[str] | None, root: Path) -> Path:
    key = "trainer.resume_from_path"
    if given is None or not str(given):
        raise ValueError(
            f"{key}: trainer.resume_mode=resume_path needs it. Set it to a {STEP_FORMAT.format('N')} folder."
        )
    if "://" in str(given):
        path = Path(copy_to_local(given, root / FETCHED, key=key))
    else:
        path = Path(expand_path(given)).absolute()
    problems = find_problems(path)
    if not problems:
        return path
    if not path.exists():
        cause, beside = "does not exist", path.parent
    elif newest_first(path):
        cause, beside = "is a folder of steps, not a step", path
    else:
        cause, beside = f"is not whole: {_summary(problems)}", path.parent
    raise ValueError(f"{key}: {path} {cause}. {_advice(path, beside)}")


def _advice(path: Path, beside: Path) -> str:
    """Which step to take instead: the newest whole one before `path`, else the newest whole one there is."""
    step = step_of(path.name)
    others = [folder for folder in newest_first(beside) if folder != path]
    earlier = [folder for folder in others if step is not None and _step_or_zero(folder) < step]
    for folder in [*sorted(earlier, key=_step_or_zero, reverse=True), *others]:
        if not find_problems(folder):
            kind = "newest whole step before it" if folder in earlier else "newest whole step there"
            return f"The {kind} is {folder}: set trainer.resume_from_path={folder}."
    return f"There is no whole step in {beside}."


def _newest_whole(root: Path, directory_format: str) -> tuple[Path | None, list[tuple[Path, list[str]]]]:
    """The newest whole step, and the newer ones that are not with their problems."""
    rejected: list[tuple[Path, list[str]]] = []
    for folder in newest_first(root, directory_format):
        problems = find_problems(folder)
        if not problems:
            return folder, rejected
        logger.warning("%s is not whole and is passed over: %s", folder, _summary(problems))
        rejected.append((folder, problems))
    return None, rejected


def _step_or_zero(folder: Path) -> int:
    return step_of(folder.name) or 0


def _summary(problems: list[str]) -> str:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more
