"""A run's state as `global_step_N/`, written beside and renamed: the frame around what each trainer saves and loads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from verl.trainer.common.run_start import RunStart
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, reading
from verl.utils.checkpoint.disk import disk_full, is_full
from verl.utils.checkpoint.steps import bytes_of_newest
from verl.utils.plain_store import load_plain, save_plain

logger = logging.getLogger(__name__)

STATE = "trainer.pt"


class Run(Protocol):
    """What all trainers have to save and restore."""

    config: Any
    global_steps: int
    train_dataloader: Any
    run_start: RunStart | None


def save_run(
    run: Run,
    write_parts: Callable[[Path], None],
    max_to_keep: int | Mapping[str, int | None] | None,
    more_state: Mapping[str, Any] | None = None,
) -> Path:
    """Write the state after `run.global_steps` steps; `write_parts` fills the folder with what its workers hold."""
    config, step = run.config.trainer, run.global_steps
    manager = CheckpointManager(config.default_local_dir, max_to_keep, config.default_hdfs_dir)
    state = {"global_steps": step, "dataloader": run.train_dataloader.state_dict(), **(more_state or {})}
    try:
        folder = manager.begin(step)
        write_parts(folder)
        save_plain(state, folder / STATE, what="trainer state")
        (folder / "config.json").write_text(json.dumps(run.config.to_dict(), indent=1, default=str))
        return manager.commit(step)
    except Exception as error:
        planned = 0 if run.run_start is None else run.run_start.step_bytes
        needed = max(planned, bytes_of_newest(manager.root))
        manager.abandon()
        if is_full(error):
            raise disk_full(manager.root, step, needed) from error
        raise


def load_run(run: Run, read_parts: Callable[[Path, Mapping[str, Any]], None]) -> None:
    """Continue from the newest whole step (or the one asked for), if there is one.

    `read_parts` gets the folder and the state, with what was `more_state` in it.
    """
    assert run.run_start is not None, "a run is started before its models are loaded"
    path = run.run_start.resume_from
    if path is None:
        logger.info("no checkpoint to resume from: starting at step 0")
        return
    with reading(path):
        state = load_plain(path / STATE)
        run.global_steps = int(state["global_steps"])
        run.train_dataloader.load_state_dict(state["dataloader"])
        read_parts(path, state)
    logger.info("resumed from %s: step %d", path, run.global_steps)
