"""The step folders of a run's checkpoint folder: names, order, sizes, and what killed processes left behind."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import uuid
from pathlib import Path

from verl.utils.checkpoint.manifest import LATEST, MANIFEST, Manifest, damaged_files, read_manifest

logger = logging.getLogger(__name__)

STEP_FORMAT = "global_step_{}"
LOCK = ".lock"
FETCHED = ".remote"
"""Folder for steps that were copied back from a remote."""
ITERATION = "latest_checkpointed_iteration.txt"
RECORD_FOLDER = "record"
"""Folder with the recording of the run (`verl.recording`)."""

_LEFTOVER = re.compile(r"\.(?P<step>global_step_\d+)\.(?P<kind>tmp|old|del)-\d+-[0-9a-f]+")
_PARTIAL = re.compile(rf"\.({re.escape(LATEST)}|{re.escape(ITERATION)}|{re.escape(MANIFEST)})\.[0-9a-f]+\.partial")


def newest_first(root: Path, directory_format: str = STEP_FORMAT) -> list[Path]:
    """Return the step folders, the last saved one first; those without a readable manifest come before all others.

    The serial of the save decides, not the step number: a run that went back to step 5 and saved 6 continues from 6,
    even if an abandoned step 15 lies beside it.
    """
    if not root.is_dir():
        return []
    steps = []
    for folder in root.iterdir():
        step = step_of(folder.name, directory_format)
        if step is not None and folder.is_dir():
            serial = serial_of(folder)
            steps.append((float("inf") if serial is None else serial, step, folder))
    return [folder for _, _, folder in sorted(steps, reverse=True)]


def step_of(name: str, directory_format: str = STEP_FORMAT) -> int | None:
    """Return the number in a step folder's name; None for other names."""
    before, mark, after = directory_format.partition("{}")
    if not mark:
        raise ValueError(
            f"directory_format: {directory_format!r} has no {{}} in place of the step. Use {STEP_FORMAT!r}."
        )
    number = name[len(before) : len(name) - len(after)]
    fits = name == before + number + after and number.isascii() and number.isdecimal()
    return int(number) if fits else None


def manifest_of(folder: Path) -> Manifest | None:
    """Return the manifest of a step; None if it is missing or damaged."""
    try:
        return read_manifest(folder)
    except (ValueError, OSError):
        return None


def has_expected_sizes(folder: Path) -> bool:
    """Return whether all files of a step have the sizes in its manifest. Quick: contents are not compared."""
    manifest = manifest_of(folder)
    return manifest is not None and not damaged_files(folder, manifest, contents=False)


def serial_of(folder: Path) -> int | None:
    """Return the serial of a step's save, which grows with every save into its root; None without a manifest."""
    manifest = manifest_of(folder)
    return None if manifest is None else manifest.serial


def last_serial(root: Path) -> int:
    """Return the largest serial of the steps and fetched copies in `root`."""
    serials = [serial_of(folder) for folder in [*newest_first(root), *fetched_steps(root)]]
    return max((serial for serial in serials if serial is not None), default=0)


def bytes_of_newest(root: Path) -> int:
    """Return the size of the last saved step according to its manifest; 0 if there is none."""
    manifests = (manifest_of(folder) for folder in newest_first(root))
    newest = next((manifest for manifest in manifests if manifest is not None), None)
    return 0 if newest is None else newest.total_bytes


def bytes_of_all(root: Path) -> int:
    """Return the size of all steps according to their manifests."""
    return sum(manifest.total_bytes for folder in newest_first(root) if (manifest := manifest_of(folder)) is not None)


def fetched_steps(root: Path) -> list[Path]:
    """Return the steps that were copied from a remote in order to resume from them."""
    return [path.parent for path in (root / FETCHED).glob(f"*/*/{MANIFEST}")]


def temporary_path(root: Path, name: str, kind: str) -> Path:
    """Return a hidden path beside the steps; unique, since an earlier one may not have been deleted completely."""
    return root / f".{name}.{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def move_aside(root: Path) -> Path | None:
    """Move the steps of earlier runs into `before_<time>` in `root`, from which they can be resumed.

    Returns the new folder; None: there are no steps. Requires ownership of the folder.
    """
    if not newest_first(root):
        return None
    names = (LATEST, ITERATION, FETCHED, RECORD_FOLDER)
    # The steps last: after an interruption, the next call finds the remaining ones.
    paths = [
        *(root / name for name in names if (root / name).exists()),
        *root.glob("debug_step_*"),
        *newest_first(root),
    ]
    aside = root / f"before_{time.strftime('%Y%m%d-%H%M%S')}"
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-1")
    aside.mkdir()
    for path in paths:
        os.rename(path, aside / path.name)
    return aside


def clean_up(root: Path) -> None:
    """Complete or undo the unfinished work of killed processes. Requires the writer lock."""
    for leftover in [*root.glob(".*"), *root.glob(f"{STEP_FORMAT.format('*')}/.*")]:
        match = _LEFTOVER.fullmatch(leftover.name)
        if match and match["kind"] == "old" and not (root / match["step"]).exists():
            # Killed between the two renames with which a step replaces one of the same number.
            os.rename(leftover, root / match["step"])
        elif match:
            logger.info("removing %s, left by a run that was killed", leftover)
            # A worker that outlived its run may still write there; the next call deletes the rest.
            shutil.rmtree(leftover, ignore_errors=True)
        elif _PARTIAL.fullmatch(leftover.name):
            leftover.unlink(missing_ok=True)
