"""Budgets of recordings: which groups and steps are kept, and which recordings of earlier runs are deleted."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from verl.recording import schema

logger = logging.getLogger(__name__)

# A recording that was written to so recently may belong to a run in progress.
_ACTIVE_S = 3600.0


def set_aside(folder: Path, run_id: str | None, max_bytes: int | None = None) -> None:
    """Move the recording in `folder` to `<folder>_before_<time>`, unless it is of the command `run_id`.

    `max_bytes`: budget of all recordings that were moved aside; the oldest ones beyond it are deleted.
    """
    if folder.exists() and (run_id is None or _run_id(folder) != run_id):
        target = folder.with_name(f"{folder.name}_before_{time.strftime('%Y%m%d-%H%M%S')}")
        while target.exists():
            target = target.with_name(f"{target.name}-1")
        os.rename(folder, target)
        # Nothing writes to folders that were moved aside: they are deleted whatever their age.
        delete_oldest(folder.parent.glob(f"{folder.name}_before_*"), max_bytes, active_s=0.0)


def delete_oldest(folders: Iterable[Path], max_bytes: int | None, active_s: float = _ACTIVE_S) -> list[Path]:
    """Delete the oldest folders until all together are within `max_bytes` (None: no limit); return the deleted ones.

    The newest one, and folders in which a file changed within the last `active_s` seconds, are kept.
    """
    if max_bytes is None:
        return []
    newest_first = sorted(folders, key=_changed, reverse=True)
    total, deleted = sum(map(size_of, newest_first[:1])), []
    for folder in newest_first[1:]:
        total += size_of(folder)
        if total > max_bytes and time.time() - _changed(folder) >= active_s:
            shutil.rmtree(folder)
            deleted.append(folder)
    if deleted:
        names = ", ".join(folder.name for folder in deleted)
        logger.warning("recording: deleted to stay within trainer.record.max_gb (%g GB): %s", max_bytes / 1e9, names)
    return deleted


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _changed(folder: Path) -> float:
    """Time of the last change of a file in the folder; 0 if it has none."""
    return max((path.stat().st_mtime for path in folder.rglob("*") if path.is_file()), default=0.0)


def _run_id(folder: Path) -> str | None:
    try:
        return json.loads((folder / schema.RUN_FILE).read_bytes())["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def groups_within(sizes: Sequence[int], budget: int, seed: int) -> list[int]:
    """Return the indices of the groups to record, in ascending order: all if they fit into `budget` bytes, else a
    uniform sample.

    The groups are put in a random order, and recorded up to the first one that does not fit. `sizes`: bytes of each.
    """
    if sum(sizes) <= budget:
        return list(range(len(sizes)))
    order = np.random.default_rng(seed).permutation(len(sizes))
    fitting = int(np.searchsorted(np.cumsum(np.asarray(sizes)[order]), budget, side="right"))
    return sorted(order[:fitting].tolist())


def step_to_drop(steps: Sequence[int]) -> int | None:
    """Return the recorded step whose removal leaves the smallest gap, so that the remaining ones stay evenly spaced;
    of equal gaps the earliest. Never the first or the last step. None if there is no other.

    `steps`: in ascending order.
    """
    gaps = [(steps[i + 1] - steps[i - 1], steps[i]) for i in range(1, len(steps) - 1)]
    return min(gaps)[1] if gaps else None
