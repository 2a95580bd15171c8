"""Before models are loaded: what a run will write can be written, and its checkpoints fit on their disk."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.config.problems import Problem, Report
from verl.trainer.run_parts import RunPart
from verl.utils.checkpoint.disk import describe_disk, show_bytes
from verl.utils.checkpoint.steps import bytes_of_all
from verl.utils.fs import expand_path
from verl.utils.tracking import tracking_folders, tracking_problems

logger = logging.getLogger(__name__)

_FLOAT32, _HALF = 4, 2


def step_bytes(part: RunPart) -> int:
    """What one step of a part takes: float32 shards, two moments of what learns, the model for transformers."""
    expected, contents = part.expected, part.checkpoint.save_contents
    stored = sum(math.prod(spec.shape) for spec in expected.tensors.values())
    learning = sum(math.prod(spec.shape) for spec in expected.learning.values())
    copies = 2 if expected.about["lora"] else 1  # adapters are written once more, as peft loads them
    total = 0
    if "model" in contents:
        total += stored * _FLOAT32 * copies
    if "optimizer" in contents:
        total += 2 * learning * (_HALF if part.optim.state_dtype == "bf16" else _FLOAT32)
    if "hf_model" in contents:
        total += expected.parameters * (_FLOAT32 if part.precision == "fp32" else _HALF)
    return total


def check_space(config: Any, parts: Sequence[RunPart], save_freq: int | None, report: Report) -> None:
    """A problem where the steps that are kept, and the one being written, do not fit; a warning where all would not."""
    root = Path(expand_path(config.default_local_dir)).absolute()
    sizes = {part: step_bytes(part) for part in parts}
    free = shutil.disk_usage(root).free
    if any(part.limit is not None for part in parts):
        free += bytes_of_all(root)  # what is there goes as new steps come
    needed = sum(size * _kept(part.limit, config.total_training_steps, save_freq) for part, size in sizes.items())
    one = sum(sizes.values())
    if needed > free:
        why = (
            f"its disk {describe_disk(root)} has {show_bytes(free)} for checkpoints, which need {show_bytes(needed)}: "
            f"a step is {show_bytes(one)}, and those kept and the one being written must fit"
        )
        fix = (
            "Free some or choose another; or keep fewer (trainer.max_actor_ckpt_to_keep, in SFT max_ckpt_to_keep) or "
            "less of each (checkpoint.save_contents)"
        )
        report.add(Problem("trainer.default_local_dir", config.default_local_dir, why, fix))
    elif one:
        logger.info("A step is about %s; %s has room for %d.", show_bytes(one), describe_disk(root), free // one)


def check_writable(config: Any, folders: Mapping[str, str | None], report: Report) -> None:
    """Problems of the trackers, of their folders and of those that keys name."""
    for text in tracking_problems(config.logger):
        report.add(Problem("trainer.logger", config.logger, text, "Correct it, or leave it out"))
    places = {("trainer.logger", str(folder)) for folder in tracking_folders(config)}
    for key, folder in [*sorted(places), *((key, folder) for key, folder in folders.items() if folder is not None)]:
        problem = unwritable(Path(expand_path(folder)))
        if problem is not None:
            report.add(Problem(key, folder, problem, "Choose another folder, or change its rights"))


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written into a folder, which is made if need be; None where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-") as file:
            file.write(b"1")
            file.flush()
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror or error})"
    return None


def _kept(limit: int | None, total_steps: int | None, save_freq: int | None) -> int:
    """How many steps must have room at once; without a limit one, since the user may move them elsewhere."""
    if limit is None or (save_freq is not None and save_freq <= 0):
        return 1
    if total_steps is None or save_freq is None:
        return limit + 1
    return min(limit + 1, math.ceil(total_steps / save_freq))
