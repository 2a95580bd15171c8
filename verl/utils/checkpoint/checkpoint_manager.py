"""The folders of a run's checkpoints: `global_step_N/` is written beside, checked, and renamed into place.

Killed at any moment, a run leaves the steps it had, or those and the new one; never half a step under a step's name.
What starts with a dot in the root is work in progress and may be deleted when no process is saving.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verl.utils.checkpoint import remote as copies
from verl.utils.checkpoint.locks import deleter_lock, reader_lock, writer_lock
from verl.utils.checkpoint.manifest import (
    MANIFEST,
    ChecksumRecorder,
    find_problems,
    read_manifest,
    sync_folder,
    write_atomically,
    write_manifest,
)
from verl.utils.fs import copy_to_local, expand_path, filesystem_of

__all__ = ["CheckpointManager", "ChecksumRecorder", "find_latest_ckpt_path", "reading", "resolve_resume"]

logger = logging.getLogger(__name__)

STEP_FORMAT = "global_step_{}"

_LOCK = ".lock"
_FETCHED = ".remote"
_LEFTOVER = re.compile(r"\.(?P<step>global_step_\d+)\.(?P<kind>tmp|old|del)-\d+-[0-9a-f]+")
_PARTIAL = re.compile(rf"\.({re.escape(copies.LATEST)}|{re.escape(copies.ITERATION)})\.\d+\.partial")


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
    """Saves steps into `root`: `folder = begin(step)`, all workers write into it, `commit(step)`.

    `max_to_keep` limits the local steps (None: no limit); `remote`, a path or URL, gets a copy of each, without limit.
    """

    def __init__(self, root: str | os.PathLike[str], max_to_keep: int | None = None, remote: str | None = None) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(
                f"trainer.max_actor_ckpt_to_keep: {max_to_keep} would keep no step. Use 1 or more, or null for all."
            )
        if remote is not None:
            filesystem_of(remote, copies.KEY)
        self.root = Path(expand_path(root)).absolute()
        self.max_to_keep, self.remote = max_to_keep, remote
        self._open: tuple[int, Path] | None = None
        self._lock = ExitStack()

    def begin(self, step: int) -> Path:
        """An empty folder for the files of `step`, on the file system they will stay on. Ends an unfinished save."""
        if step < 0:
            raise ValueError(f"step: {step} is negative. Steps count from 0.")
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock.close()
        if not self._lock.enter_context(writer_lock(self.root / _LOCK)):
            self._lock.close()
            raise ValueError(
                f"trainer.default_local_dir: another process is saving into {self.root}. "
                "Give each run a folder of its own (trainer.experiment_name is part of the default)."
            )
        self._open = None
        _tidy(self.root)
        folder = _hidden(self.root, STEP_FORMAT.format(step), "tmp")
        folder.mkdir()
        self._open = (step, folder)
        return folder

    def commit(self, step: int) -> Path:
        """Make what was written since `begin(step)` the newest step, delete steps over the limit, copy to `remote`."""
        if self._open is None or self._open[0] != step:
            raise ValueError(f"step: commit({step}) without begin({step}). Write into the folder that begin returns.")
        folder, target = self._open[1], self.root / STEP_FORMAT.format(step)
        write_manifest(folder, step, serial=1 + _last_serial(self.root))
        replaced = None
        if target.exists():
            replaced = _hidden(self.root, target.name, "old")
            os.rename(target, replaced)
        os.rename(folder, target)
        sync_folder(self.root)
        write_atomically(self.root / copies.ITERATION, str(step).encode())
        write_atomically(self.root / copies.LATEST, target.name.encode())
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._open = None
        self._retire(target)
        self._lock.close()
        if self.remote is not None:
            copies.upload_step(target, self.remote)
        return target

    @staticmethod
    def verify(path: str | os.PathLike[str]) -> list[str]:
        """What keeps the step at `path` from being whole, one line per missing, truncated or damaged file."""
        return find_problems(Path(path))

    def latest_whole(self) -> Path | None:
        """The newest whole step, walking back over damaged ones (each is logged with its problem)."""
        self.clean()
        return _newest_whole(self.root, STEP_FORMAT)[0]

    def clean(self) -> None:
        """Remove what killed runs left unfinished, unless some process is saving right now."""
        if self._open is None and os.access(self.root, os.W_OK):
            with writer_lock(self.root / _LOCK) as alone:
                if alone:
                    _tidy(self.root)

    def _retire(self, newest: Path) -> None:
        """Delete the oldest steps over the limit. Folders that are not ours and steps being read stay."""
        if self.max_to_keep is not None:
            kept = 0
            for folder in _newest_first(self.root, STEP_FORMAT):
                if kept >= self.max_to_keep and folder != newest and _serial(folder) is not None:
                    _delete_unless_read(folder, self.root)
                elif not find_problems(folder, contents=False):
                    kept += 1
        # Fetched copies were there to start from; their originals stay at the remote, and a newer step is here now.
        for folder in _fetched(self.root):
            _delete_unless_read(folder, self.root)


def _resume_newest(root: Path, remote: str | None) -> Path | None:
    CheckpointManager(root).clean()
    local, rejected = _newest_whole(root, STEP_FORMAT)
    if remote is not None:
        known = -1 if local is None else _serial(local)
        fetched = _fetch_newer(remote, root, -1 if known is None else known)
        if fetched is not None:
            return fetched
    if local is None and rejected:
        listed = "; ".join(f"{folder.name}: {_summary(problems)}" for folder, problems in rejected)
        raise ValueError(
            f"trainer.resume_mode: auto finds steps in {root}, but none is whole ({listed}). "
            "Restore the files, or set trainer.resume_mode=disable to begin anew."
        )
    return local


def _fetch_newer(remote: str, root: Path, serial: int) -> Path | None:
    """A local copy of the newest whole step at `remote` saved after `serial`."""
    for name in copies.newest_first(remote, lambda name: _step_of(name, STEP_FORMAT)):
        manifest = copies.read_remote_manifest(remote, name)
        if manifest is None:
            continue
        if manifest.serial <= serial:
            return None
        path = Path(copy_to_local(f"{remote.rstrip('/')}/{name}", root / _FETCHED, key=copies.KEY))
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
        path = Path(copy_to_local(given, root / _FETCHED, key=key))
    else:
        path = Path(expand_path(given)).absolute()
    problems = find_problems(path)
    if not problems:
        return path
    if not path.exists():
        cause, beside = "does not exist", path.parent
    elif _newest_first(path, STEP_FORMAT):
        cause, beside = "is a folder of steps, not a step", path
    else:
        cause, beside = f"is not whole: {_summary(problems)}", path.parent
    raise ValueError(f"{key}: {path} {cause}. {_advice(path, beside)}")


def _advice(path: Path, beside: Path) -> str:
    """Which step to take instead: the newest whole one before `path`, else the newest whole one there is."""
    step = _step_of(path.name, STEP_FORMAT)
    others = [folder for folder in _newest_first(beside, STEP_FORMAT) if folder != path]
    earlier = [folder for folder in others if step is not None and _step_or_zero(folder) < step]
    for folder in [*sorted(earlier, key=_step_or_zero, reverse=True), *others]:
        if not find_problems(folder):
            kind = "newest whole step before it" if folder in earlier else "newest whole step there"
            return f"The {kind} is {folder}: set trainer.resume_from_path={folder}."
    return f"There is no whole step in {beside}."


def _newest_whole(root: Path, directory_format: str) -> tuple[Path | None, list[tuple[Path, list[str]]]]:
    """The newest whole step, and the newer ones that are not with their problems."""
    rejected: list[tuple[Path, list[str]]] = []
    for folder in _newest_first(root, directory_format):
        problems = find_problems(folder)
        if not problems:
            return folder, rejected
        logger.warning("%s is not whole and is passed over: %s", folder, _summary(problems))
        rejected.append((folder, problems))
    return None, rejected


def _newest_first(root: Path, directory_format: str) -> list[Path]:
    """Step folders by time of saving, the last one first; those without a readable manifest come before all others.

    The serial decides, not the step number: who went back to step 5 and saved 6 continues from 6, though an abandoned
    15 lies beside it.
    """
    if not root.is_dir():
        return []
    found = []
    for folder in root.iterdir():
        step = _step_of(folder.name, directory_format)
        if step is not None and folder.is_dir():
            serial = _serial(folder)
            found.append((float("inf") if serial is None else serial, step, folder))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def _step_of(name: str, directory_format: str) -> int | None:
    before, mark, after = directory_format.partition("{}")
    if not mark:
        raise ValueError(
            f"directory_format: {directory_format!r} has no {{}} where the step goes. Use {STEP_FORMAT!r}."
        )
    number = name[len(before) : len(name) - len(after)]
    fits = name == before + number + after and number.isascii() and number.isdecimal()
    return int(number) if fits else None


def _step_or_zero(folder: Path) -> int:
    return _step_of(folder.name, STEP_FORMAT) or 0


def _serial(folder: Path) -> int | None:
    try:
        return read_manifest(folder).serial
    except (ValueError, OSError):
        return None


def _last_serial(root: Path) -> int:
    serials = [_serial(folder) for folder in [*_newest_first(root, STEP_FORMAT), *_fetched(root)]]
    return max((serial for serial in serials if serial is not None), default=0)


def _fetched(root: Path) -> list[Path]:
    return [path.parent for path in (root / _FETCHED).glob(f"*/*/{MANIFEST}")]


def _hidden(root: Path, name: str, kind: str) -> Path:
    """A new name beside the steps; unique, since an old one may still be there if a file in it would not go."""
    return root / f".{name}.{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _delete_unless_read(folder: Path, root: Path) -> None:
    """Under another name first: deleting takes time, and a half-deleted step must not look like a damaged one."""
    doomed = _hidden(root, folder.name, "del")
    with deleter_lock(folder / MANIFEST) as unread:
        if not unread:
            logger.info("%s is over the limit but being read; it stays for now", folder)
            return
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _tidy(root: Path) -> None:
    """Finish or undo what a killed process left half done. Only while holding the writer lock."""
    for leftover in root.glob(".*"):
        found = _LEFTOVER.fullmatch(leftover.name)
        if found and found["kind"] == "old" and not (root / found["step"]).exists():
            # Killed between the two renames of a step that replaces one of the same number.
            os.rename(leftover, root / found["step"])
        elif found:
            logger.info("removing %s, left by a run that was killed", leftover)
            # A worker that outlived its run may still write there; what stays goes the next time.
            shutil.rmtree(leftover, ignore_errors=True)
        elif _PARTIAL.fullmatch(leftover.name):
            leftover.unlink(missing_ok=True)


def _summary(problems: list[str], shown: int = 5) -> str:
    more = f"; and {len(problems) - shown} more" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more
