"""The checkpoint folder of a run: `global_step_N/` is written under a temporary name and renamed into place.

Killed at any moment, a run leaves its earlier steps, or those and the new one; never a partial step under a step's
name. Names in the root that start with a dot are temporary and may be deleted while no process is saving.
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

from verl.utils.checkpoint.folders import (
    FETCHED,
    ITERATION,
    LOCK,
    STEP_FORMAT,
    clean_up,
    deleter_lock,
    fetched_steps,
    last_serial,
    manifest_of,
    newest_first,
    reader_lock,
    serial_of,
    step_of,
    temporary_path,
    writer_lock,
)
from verl.utils.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    ChecksumRecorder,
    damaged_files,
    drop_part,
    find_problems,
    has_records_folder,
    prepare_records,
    write_manifest,
)
from verl.utils.checkpoint.remote import KEY as REMOTE_KEY
from verl.utils.checkpoint.remote import Uploader, read_remote_manifest, remote_steps
from verl.utils.disk import sync_folder, write_durably
from verl.utils.fs import copy_to_local, expand_path, filesystem_of

__all__ = ["CheckpointManager", "ChecksumRecorder", "find_latest_ckpt_path", "reading", "resolve_resume"]

logger = logging.getLogger(__name__)

_STEP = "."
"""Stands for the whole step where a part (actor, critic) is named."""


def find_latest_ckpt_path(path: str | os.PathLike[str] | None, directory_format: str = STEP_FORMAT) -> str | None:
    """Return the last saved step under `path` that is complete, or None; every file is checked."""
    if path is None:
        return None
    newest, _ = _newest_complete(Path(expand_path(path)), directory_format)
    return None if newest is None else str(newest)


def resolve_resume(
    mode: str,
    root: str | os.PathLike[str],
    resume_from_path: str | os.PathLike[str] | None = None,
    remote: str | None = None,
) -> Path | None:
    """Return the step to resume from, checked file by file; None: start from scratch.

    `auto`: the newest complete step of `root` or of its copies at `remote`. `disable`: none. `resume_path`: the step at
    `resume_from_path`, a folder or URL. Copies are fetched into `root`, which all nodes of a run share.
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
    """Protect the step from deletion by retention, of any process, inside the block."""
    with reader_lock(Path(path) / MANIFEST):
        yield Path(path)


class CheckpointManager:
    """Saves steps into `root`: `folder = begin(step)`, all workers write into it, `commit(step)`; or `abandon()`.

    `max_to_keep` limits the local steps (None: no limit), or each part of them: {"actor": 3, "critic": 1} keeps the
    newest three with their folder `actor/` and only the newest one with `critic/`; a step is complete only with all its
    parts. `remote`, a path or URL, gets a copy of each step, without limit and in the background (`uploader`).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        max_to_keep: int | Mapping[str, int | None] | None = None,
        remote: str | None = None,
    ) -> None:
        self._limits = dict(max_to_keep) if isinstance(max_to_keep, Mapping) else {_STEP: max_to_keep}
        for part, limit in self._limits.items():
            if limit is not None and limit < 1:
                key = "max_ckpt_to_keep" if part == _STEP else f"max_{part}_ckpt_to_keep"
                raise ValueError(f"trainer.{key}: {limit} would keep no step. Use 1 or more, or null for all.")
        self.root = Path(expand_path(root)).absolute()
        self.uploader: Uploader | None = None
        if remote is not None:
            filesystem_of(remote, REMOTE_KEY)
            self.uploader = Uploader(self.root, remote, self._delete_old_steps)
        self._open: tuple[int, Path] | None = None
        self._newest: Path | None = None
        self._lock = ExitStack()
        self._deleting = threading.Lock()

    def begin(self, step: int) -> Path:
        """Return an empty folder for the files of `step`, on their final file system."""
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
        clean_up(self.root)
        folder = temporary_path(self.root, STEP_FORMAT.format(step), "tmp")
        prepare_records(folder)
        self._open = (step, folder)
        return folder

    def commit(self, step: int) -> Path:
        """Make the files written since `begin(step)` the newest step, start to copy it, delete steps over the limit."""
        if self._open is None or self._open[0] != step:
            raise ValueError(f"step: commit({step}) without begin({step}). Write into the folder that begin returns.")
        folder, target = self._open[1], self.root / STEP_FORMAT.format(step)
        if not has_records_folder(folder):
            raise FileNotFoundError(errno.ENOENT, f"step {step} was deleted while it was being written", str(folder))
        write_manifest(folder, step, serial=1 + last_serial(self.root))
        replaced = None
        if target.exists():
            replaced = temporary_path(self.root, target.name, "old")
            os.rename(target, replaced)
        os.rename(folder, target)
        sync_folder(self.root)
        write_durably(self.root / ITERATION, str(step).encode())
        write_durably(self.root / LATEST, target.name.encode())
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._open, self._newest = None, target
        if self.uploader is not None:
            self.uploader.add(target)
        self._delete_old_steps()
        self._lock.close()
        return target

    def abandon(self) -> None:
        """Delete the files written since `begin`: the save failed."""
        if self._open is not None:
            shutil.rmtree(self._open[1], ignore_errors=True)
            self._open = None
        self._lock.close()

    def _delete_old_steps(self) -> None:
        """Delete steps over the limits: after a save, and after a copy, which protects its step meanwhile.

        A failure is logged: the next save tries again.
        """
        if self._newest is not None:
            with self._deleting:
                try:
                    apply_limits(self.root, self._newest, self._limits)
                except OSError as error:
                    logger.warning("%s: steps over the limit could not be deleted: %s", self.root, error)

    @staticmethod
    def verify(path: str | os.PathLike[str]) -> list[str]:
        """Return why the step at `path` is not complete, one line per missing, truncated or damaged file."""
        return find_problems(Path(path))


def apply_limits(root: Path, newest: Path, limits: Mapping[str, int | None]) -> None:
    """Delete old steps, or parts of them. `limits`: the number of steps that keep a part (None: all); `_STEP` stands
    for the whole step.

    A step is deleted with its last part. `newest`, other folders and steps being read are kept; damaged steps do not
    count.
    """
    newer = 0
    limited = any(limit is not None for limit in limits.values())
    for folder in newest_first(root) if limited else []:
        manifest = manifest_of(folder)
        if manifest is None:
            continue
        kept_parts = {part for part, limit in limits.items() if limit is None or newer < limit}
        newer += not damaged_files(folder, manifest, contents=False)
        if folder == newest:
            continue
        if not any(manifest.has_part(part) for part in kept_parts):
            _delete_unless_read(folder, root)
            continue
        for part in sorted(limits.keys() - kept_parts):
            # Not listed but still there: a deletion was interrupted.
            if manifest.has_part(part) or (folder / part).exists():
                _delete_unless_read(folder, root, part)
    # Fetched copies were needed to resume; their originals stay at the remote, and a newer step exists now.
    for folder in fetched_steps(root):
        _delete_unless_read(folder, root)


def _delete_unless_read(folder: Path, root: Path, part: str = _STEP) -> None:
    path = folder / part
    with deleter_lock(folder / MANIFEST) as unread:
        if not unread:
            logger.info("%s is over the limit but being read; it stays for now", path)
            return
        if part != _STEP:
            # The manifest first: if this is interrupted, the step has unlisted files instead of missing ones.
            drop_part(folder, part)
        if path.exists():
            # Renamed first: deleting takes time, and a partly deleted step must not look damaged.
            renamed = temporary_path(root, folder.name, "del")
            os.rename(path, renamed)
            shutil.rmtree(renamed, ignore_errors=True)


def _resume_newest(root: Path, remote: str | None) -> Path | None:
    if os.access(root, os.W_OK):
        with writer_lock(root / LOCK) as locked:
            if locked:  # no process is saving: unfinished work is of killed runs
                clean_up(root)
    local, rejected = _newest_complete(root, STEP_FORMAT)
    if remote is not None:
        serial = None if local is None else serial_of(local)
        fetched = _fetch_newer(remote, root, -1 if serial is None else serial)
        if fetched is not None:
            return fetched
    if local is None and rejected:
        listed = "; ".join(f"{folder.name}: {_summary(problems)}" for folder, problems in rejected)
        raise ValueError(
            f"trainer.resume_mode: auto finds steps in {root}, but none is complete ({listed}). Restore the files, or"
            " start from scratch with trainer.resume_mode=disable, which moves them into before_<time>."
        )
    return local


def _fetch_newer(remote: str, root: Path, serial: int) -> Path | None:
    """Fetch the newest complete step at `remote` that was saved after `serial`; None: there is none."""
    for name in remote_steps(remote):
        manifest = read_remote_manifest(remote, name)
        if manifest is None:
            continue
        if manifest.serial <= serial:
            return None
        path = Path(copy_to_local(f"{remote.rstrip('/')}/{name}", root / FETCHED, key=REMOTE_KEY))
        problems = find_problems(path)
        if not problems:
            return path
        logger.warning("skipping %s/%s, which is incomplete or damaged: %s", remote, name, _summary(problems))
    return None


def _resume_from(location: str | os.PathLike[str] | None, root: Path) -> Path:
    key = "trainer.resume_from_path"
    if location is None or not str(location):
        raise ValueError(
            f"{key}: trainer.resume_mode=resume_path needs it. Set it to a {STEP_FORMAT.format('N')} folder."
        )
    if "://" in str(location):
        path = Path(copy_to_local(location, root / FETCHED, key=key))
    else:
        path = Path(expand_path(location)).absolute()
    problems = find_problems(path)
    if not problems:
        return path
    if not path.exists():
        cause, folder = "does not exist", path.parent
    elif newest_first(path):
        cause, folder = "is a folder of steps, not a step", path
    else:
        cause, folder = f"is not complete: {_summary(problems)}", path.parent
    raise ValueError(f"{key}: {path} {cause}. {_advice(path, folder)}")


def _advice(path: Path, root: Path) -> str:
    """Name an alternative: the newest complete step before `path`, else the newest complete one in `root`."""
    step = step_of(path.name)
    others = [folder for folder in newest_first(root) if folder != path]
    earlier = [folder for folder in others if step is not None and _step_or_zero(folder) < step]
    for folder in [*sorted(earlier, key=_step_or_zero, reverse=True), *others]:
        if not find_problems(folder):
            kind = "newest complete step before it" if folder in earlier else "newest complete step there"
            return f"The {kind} is {folder}: set trainer.resume_from_path={folder}."
    return f"There is no complete step in {root}."


def _newest_complete(root: Path, directory_format: str) -> tuple[Path | None, list[tuple[Path, list[str]]]]:
    """Return the newest complete step, and the newer steps with their problems."""
    rejected: list[tuple[Path, list[str]]] = []
    for folder in newest_first(root, directory_format):
        problems = find_problems(folder)
        if not problems:
            return folder, rejected
        logger.warning("skipping %s, which is incomplete or damaged: %s", folder, _summary(problems))
        rejected.append((folder, problems))
    return None, rejected


def _step_or_zero(folder: Path) -> int:
    return step_of(folder.name) or 0


def _summary(problems: list[str]) -> str:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more
