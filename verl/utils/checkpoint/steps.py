"""The step folders of a root: which there are, in what order they were saved, and what killed processes left."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import uuid
from pathlib import Path

from verl.utils.checkpoint import remote as copies
from verl.utils.checkpoint.manifest import LATEST, MANIFEST, Manifest, read_manifest

logger = logging.getLogger(__name__)

STEP_FORMAT = "global_step_{}"
LOCK = ".lock"
FETCHED = ".remote"

_LEFTOVER = re.compile(r"\.(?P<step>global_step_\d+)\.(?P<kind>tmp|old|del)-\d+-[0-9a-f]+")
_PARTIAL = re.compile(
    rf"\.({re.escape(LATEST)}|{re.escape(copies.ITERATION)}|{re.escape(MANIFEST)})\.[0-9a-f]+\.partial"
)


def newest_first(root: Path, directory_format: str = STEP_FORMAT) -> list[Path]:
    """Step folders by time of saving, the last one first; those without a readable manifest come before all others.

    The serial decides, not the step number: who went back to step 5 and saved 6 continues from 6, though an abandoned
    15 lies beside it.
    """
    if not root.is_dir():
        return []
    found = []
    for folder in root.iterdir():
        step = step_of(folder.name, directory_format)
        if step is not None and folder.is_dir():
            serial = serial_of(folder)
            found.append((float("inf") if serial is None else serial, step, folder))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def step_of(name: str, directory_format: str = STEP_FORMAT) -> int | None:
    """The number in a step folder's name; None where it is not one."""
    before, mark, after = directory_format.partition("{}")
    if not mark:
        raise ValueError(
            f"directory_format: {directory_format!r} has no {{}} where the step goes. Use {STEP_FORMAT!r}."
        )
    number = name[len(before) : len(name) - len(after)]
    fits = name == before + number + after and number.isascii() and number.isdecimal()
    return int(number) if fits else None


def manifest_of(folder: Path) -> Manifest | None:
    """The manifest of a step of ours; None where it is missing or damaged."""
    try:
        return read_manifest(folder)
    except (ValueError, OSError):
        return None


def looks_whole(folder: Path) -> bool:
    """Whether the files of a step have the sizes that its manifest says; loading compares their contents too."""
    manifest = manifest_of(folder)
    try:
        return manifest is not None and all(
            (folder / name).stat().st_size == record.size for name, record in manifest.files.items()
        )
    except OSError:
        return False


def serial_of(folder: Path) -> int | None:
    """When a step was saved, in saves into its root; None where it has no readable manifest."""
    manifest = manifest_of(folder)
    return None if manifest is None else manifest.serial


def last_serial(root: Path) -> int:
    """The largest serial of the steps and fetched copies in `root`."""
    serials = [serial_of(folder) for folder in [*newest_first(root), *fetched(root)]]
    return max((serial for serial in serials if serial is not None), default=0)


def bytes_of_newest(root: Path) -> int:
    """The size of the step saved last, by its manifest; 0 where there is none."""
    manifests = (manifest_of(folder) for folder in newest_first(root))
    newest = next((manifest for manifest in manifests if manifest is not None), None)
    return 0 if newest is None else newest.total_bytes


def bytes_of_all(root: Path) -> int:
    """The size of all steps of ours, by their manifests."""
    return sum(manifest.total_bytes for folder in newest_first(root) if (manifest := manifest_of(folder)) is not None)


def fetched(root: Path) -> list[Path]:
    """Copies of steps that came from a remote to be resumed from."""
    return [path.parent for path in (root / FETCHED).glob(f"*/*/{MANIFEST}")]


def hidden(root: Path, name: str, kind: str) -> Path:
    """A new name beside the steps; unique, since an old one may still be there if a file in it would not go."""
    return root / f".{name}.{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def move_aside(root: Path) -> Path | None:
    """Put what earlier runs left in `root` into a folder in it, from which it can be resumed; None: there are no steps.

    Only while owning the folder.
    """
    if not newest_first(root):
        return None
    names = (LATEST, copies.ITERATION, FETCHED)
    # The steps last: if this is interrupted, the next call finds those that remain.
    mine = [*(root / name for name in names if (root / name).exists()), *root.glob("debug_step_*"), *newest_first(root)]
    aside = root / f"before_{time.strftime('%Y%m%d-%H%M%S')}"
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-1")
    aside.mkdir()
    for path in mine:
        os.rename(path, aside / path.name)
    return aside


def tidy(root: Path) -> None:
    """Finish or undo what a killed process left half done. Only while holding the writer lock."""
    for leftover in [*root.glob(".*"), *root.glob(f"{STEP_FORMAT.format('*')}/.*")]:
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
