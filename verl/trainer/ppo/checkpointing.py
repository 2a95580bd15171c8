"""A whole training state as `global_step_N/`: workers, dataloader, controllers; written beside, then renamed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, reading, resolve_resume
from verl.utils.plain_store import load_plain, save_plain

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)


def save(trainer: RayPPOTrainer) -> Path:
    """Write the state after `trainer.global_steps` steps."""
    config, step = trainer.config.trainer, trainer.global_steps
    manager = CheckpointManager(config.default_local_dir, config.max_actor_ckpt_to_keep, config.default_hdfs_dir)
    folder = manager.begin(step)
    pending = [trainer.actor_wg.save_checkpoint(str(folder / "actor"))]
    if trainer.use_critic:
        pending.append(trainer.critic_wg.save_checkpoint(str(folder / "critic")))
    for future in pending:
        future.get()
    trainer.tokenizer.save_pretrained(folder / "actor" / "huggingface")
    state = {
        "global_steps": step,
        "policy_version": trainer.policy_version,
        "kl_coef": trainer.kl_ctrl_in_reward.value,
        "dataloader": trainer.train_dataloader.state_dict(),
    }
    save_plain(state, folder / "trainer.pt", what="trainer state")
    (folder / "config.json").write_text(json.dumps(trainer.config.to_dict(), indent=1, default=str))
    return manager.commit(step)


def load(trainer: RayPPOTrainer) -> None:
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
        trainer.policy_version = int(state["policy_version"])
        trainer.kl_ctrl_in_reward.value = state["kl_coef"]
        trainer.train_dataloader.load_state_dict(state["dataloader"])
        trainer.actor_wg.load_checkpoint(str(path / "actor"))
        if trainer.use_critic:
            trainer.critic_wg.load_checkpoint(str(path / "critic"))
    logger.info("resumed from %s: step %d", path, trainer.global_steps)
