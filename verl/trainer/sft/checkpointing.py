"""A supervised run's state as `global_step_N/`: model, optimizer, data position, and the model as others load it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, reading, resolve_resume
from verl.utils.plain_store import load_plain, save_plain

if TYPE_CHECKING:
    from verl.trainer.sft.trainer import SFTTrainer

logger = logging.getLogger(__name__)


def save(trainer: SFTTrainer) -> Path:
    """Write the state after `trainer.global_steps` steps; `huggingface/` in it is a model for `model.path`."""
    config, step = trainer.config.trainer, trainer.global_steps
    manager = CheckpointManager(config.default_local_dir, config.max_ckpt_to_keep, config.default_hdfs_dir)
    folder = manager.begin(step)
    trainer.worker_group.save_checkpoint(str(folder))
    if "hf_model" in trainer.config.checkpoint.save_contents:
        trainer.tokenizer.save_pretrained(folder / "huggingface")
    state = {"global_steps": step, "dataloader": trainer.train_dataloader.state_dict()}
    save_plain(state, folder / "trainer.pt", what="trainer state")
    (folder / "config.json").write_text(json.dumps(trainer.config.to_dict(), indent=1, default=str))
    return manager.commit(step)


def load(trainer: SFTTrainer) -> None:
    """Continue from the newest whole step (or the one asked for), if there is one."""
    config = trainer.config.trainer
    path = resolve_resume(
        config.resume_mode, config.default_local_dir, config.resume_from_path, config.default_hdfs_dir
    )
    if path is None:
        logger.info("no checkpoint to resume from: starting at step 0")
        return
    with reading(path):
        state = load_plain(path / "trainer.pt")
        trainer.global_steps = int(state["global_steps"])
        trainer.train_dataloader.load_state_dict(state["dataloader"])
        trainer.worker_group.load_checkpoint(str(path))
    logger.info("resumed from %s: step %d", path, trainer.global_steps)
