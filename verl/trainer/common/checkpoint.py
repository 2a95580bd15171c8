"""A run's state as `global_step_N/`, written beside and renamed: the frame around what each trainer saves and loads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, reading
from verl.utils.checkpoint.disk import disk_full, is_full
from verl.utils.checkpoint.steps import bytes_of_newest
from verl.utils.plain_store import load_plain, save_plain

logger = logging.getLogger(__name__)

STATE = "trainer.pt"


def save_step(
    config: Any,
    state: Mapping[str, Any],
    write_parts: Callable[[Path], None],
    max_to_keep: int | Mapping[str, int | None] | None,
    planned_bytes: int = 0,
) -> Path:
    """Write the state after `state["global_steps"]` steps; `write_parts` fills the folder with what the workers hold.

    `config` is the whole run's; `planned_bytes` is what a step was expected to take.
    """
    trainer, step = config.trainer, state["global_steps"]
    manager = CheckpointManager(trainer.default_local_dir, max_to_keep, trainer.default_hdfs_dir)
    try:
        folder = manager.begin(step)
        write_parts(folder)
        save_plain(dict(state), folder / STATE, what="trainer state")
        (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1, default=str))
        return manager.commit(step)
    except Exception as error:
        needed = max(planned_bytes, bytes_of_newest(manager.root))
        manager.abandon()
        if is_full(error):
            raise disk_full(manager.root, step, needed) from error
        raise


def load_step(folder: Path | None, read: Callable[[Path, Mapping[str, Any]], None]) -> None:
    """Give `read` the folder of a saved step and its state; nothing where the run begins anew."""
    if folder is None:
        logger.info("no checkpoint to resume from: starting at step 0")
        return
    with reading(folder):
        state = load_plain(folder / STATE)
        read(folder, state)
    logger.info("resumed from %s: step %d", folder, state["global_steps"])
