"""Budgets of recordings: which groups and steps are kept, and which recordings of earlier runs are deleted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from verl.recording import schema

logger = logging.getLogger(__name__)

# A recording that was written to so recently may belong to a run in progress.
_ACTIVE_S = 3600.0


def set_aside(folder: Path, run_id: str | None) -> None:
    """Move the recording in `folder` to `<folder>_before_<time>`, unless it is of the command `run_id`."""
    if folder.exists() and (run_id is None or _run_id(folder) != run_id):
        target = folder.with_name(f"{folder.name}_before_{time.strftime('%Y%m%d-%H%M%S')}")
        while target.exists():
            target = target.with_name(f"{target.name}-1")
        os.rename(folder, target)


def earlier_recordings(folder: Path) -> list[Path]:
    """Return the recordings that `set_aside` has moved, the oldest first."""
    return sorted(folder.parent.glob(f"{folder.name}_before_*"), key=_changed)


def delete_oldest(folders: Iterable[Path], max_bytes: int) -> list[Path]:
    """Delete the oldest folders until all together are within `max_bytes`; return the deleted ones.

    The newest one, and folders in which a file changed within the last hour, are kept: runs may be recording in them.
    """
    newest_first = sorted(folders, key=_changed, reverse=True)
    total, deleted = sum(map(size_of, newest_first[:1])), []
    for folder in newest_first[1:]:
        total += size_of(folder)
        if total > max_bytes and time.time() - _changed(folder) >= _ACTIVE_S and delete_recording(folder, max_bytes):
            deleted.append(folder)
    return deleted


def delete_recording(folder: Path, max_bytes: int) -> bool:
    """Delete a recording that exceeds the budget; return False if another process has deleted it."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return False
    limit = f"trainer.record.max_gb ({max_bytes / 1e9:g} GB)"
    logger.warning("recording: deleted %s to stay within %s", folder.name, limit)
    return True


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(stat.st_size for stat in _stats(folder))


def _changed(folder: Path) -> float:
    """Time of the last change of a file in the folder; 0 if it has none."""
    return max((stat.st_mtime for stat in _stats(folder)), default=0.0)


def _stats(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of every file in a folder. Other processes may write and delete files meanwhile."""
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(root, name))


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
