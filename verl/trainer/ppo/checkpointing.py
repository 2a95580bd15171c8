"""What a checkpoint of reinforcement learning holds: actor, critic, the policy's version and the KL controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import PPOConfig
from verl.trainer.common.checkpoint import load_run, save_run
from verl.trainer.common.run_start import RunStart, run_parts

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer


def start(trainer: RayPPOTrainer) -> None:
    """Check what the run needs before its models are loaded, unless whoever made the trainer did."""
    if trainer.run_start is None:
        trainer.run_start = started(trainer.config, trainer.role_worker_mapping)


def started(config: PPOConfig, workers: Mapping[Any, type]) -> RunStart:
    """The start of a run whose roles are done by these classes."""
    trainer = config.trainer
    folders = {f"trainer.{key}": trainer[key] for key in ("rollout_data_dir", "validation_data_dir")}
    return RunStart(trainer, run_parts(config, workers.values()), folders, saves=not trainer.val_only)


def first_step(trainer: RayPPOTrainer) -> int | None:
    """The first step that a run will log; None where it only validates and adds to what is there."""
    start(trainer)
    return None if trainer.run_start is None or trainer.config.trainer.val_only else trainer.run_start.first_step


def end(trainer: RayPPOTrainer) -> None:
    """The run is over: its folder may be another's."""
    if trainer.run_start is not None:
        trainer.run_start.close()
        trainer.run_start = None


def save(trainer: RayPPOTrainer) -> Path:
    """Write the state after `trainer.global_steps` steps; `actor/huggingface/` in it is a model for `model.path`."""
    config = trainer.config.trainer
    limits = {"actor": config.max_actor_ckpt_to_keep}
    if trainer.use_critic:
        limits["critic"] = config.max_critic_ckpt_to_keep

    def write_parts(folder: Path) -> None:
        pending = [trainer.actor_wg.save_checkpoint(str(folder / "actor"))]
        if trainer.use_critic:
            pending.append(trainer.critic_wg.save_checkpoint(str(folder / "critic")))
        wait_for_all(pending)
        if "hf_model" in trainer.config.actor_rollout_ref.actor.checkpoint.save_contents:
            trainer.tokenizer.save_pretrained(folder / "actor" / "huggingface")

    state = {
        "policy_version": trainer.policy_version,
        "kl_coef": trainer.kl_ctrl_in_reward.value,
        "prompts": trainer.prompts.state_dict(),
        "dataloader": trainer.prompts.loader_state(),
    }
    return save_run(trainer, write_parts, limits, state)


def wait_for_all(pending: Sequence[Any]) -> None:
    """Until none writes any more; then raise the first failure, if there is one."""
    failures = []
    for future in pending:
        try:
            future.get()
        except Exception as error:  # noqa: BLE001 - raised below, when no other part is being written
            failures.append(error)
    if failures:
        raise failures[0]


def load(trainer: RayPPOTrainer) -> None:
    """Continue from the newest whole step (or the one asked for), if there is one."""

    def read_parts(path: Path, state: Mapping[str, Any]) -> None:
        trainer.policy_version = int(state["policy_version"])
        trainer.kl_ctrl_in_reward.value = state["kl_coef"]
        trainer.prompts.load_state_dict(state["prompts"])
        trainer.actor_wg.load_checkpoint(str(path / "actor"))
        if trainer.use_critic:
            trainer.critic_wg.load_checkpoint(str(path / "critic"))

    start(trainer)
    load_run(trainer, read_parts)
