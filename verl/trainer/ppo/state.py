"""TrainerState: progress of a run and contents of its checkpoints (actor, critic, prompts, KL controller, version).

TrainerAttributes: public attributes of the trainer with values of its collaborators.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl.algos import get_kl_controller
from verl.config import PPOConfig
from verl.trainer.asynchronous.group_state import saved_prompts
from verl.trainer.common.checkpoint import Saver, background_part, load_step
from verl.trainer.common.run_start import RunStart, run_parts
from verl.trainer.ppo.prompts import PromptStream
from verl.trainer.ppo.row_balancing import concat_prompts
from verl.trainer.ppo.utils import POLICY_ROLES, Role
from verl.trainer.ppo.worker_groups import WorkerGroups

if TYPE_CHECKING:
    from verl.trainer.ppo.generator import Generator

logger = logging.getLogger(__name__)


class RolloutStream(Protocol):
    """The untrained prompts of an async run that were submitted for generation, with their responses so far."""

    def state(self, partials: bool) -> dict[str, Any]:
        """Return the state as plain data. `partials`: include unfinished responses, which takes longer."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from this state."""


class TrainerState:
    """The state of the controller that changes from step to step, and its checkpoint folder."""

    prompts: PromptStream
    stream: RolloutStream | None = None
    """None if `trainer.mode` is sync."""

    def __init__(self, config: PPOConfig, workers: Mapping[Role, type], tokenizer: Any) -> None:
        """`workers` maps each role to its worker class."""
        self._config, self._workers = config, workers
        self.step = 0
        """The current step, or the last completed one between steps; the first is 1."""
        self.policy_version = 0
        """Number of actor updates so far; the version of the weights that the next sync sends."""
        self.kl_controller: Any = get_kl_controller(config.algorithm.kl_ctrl)
        self.run_start: RunStart | None = None
        self._snapshot: dict[str, Any] | None = None
        """Checkpoint contents at the last `take_snapshot`."""
        self._saves_snapshot = False
        """Whether `save` writes the snapshot instead of the current state."""
        limits = {"actor": config.trainer.max_actor_ckpt_to_keep}
        if Role.Critic in workers:
            limits["critic"] = config.trainer.max_critic_ckpt_to_keep
        self.saver = Saver(config, limits, tokenizer, lambda: self.run_start)

    def set_dataloader(self, loader: Any) -> None:
        """Draw the training prompts from this dataloader."""
        self._loader = loader
        self.prompts = PromptStream(loader, self._config.trainer.total_epochs, self._config.data.gen_batch_size)

    def check_start(self) -> RunStart:
        """Run the checks that precede model loading, unless `run_start` is already set; return `run_start`."""
        if self.run_start is None:
            self.run_start = check_run_start(self._config, self._workers)
        return self.run_start

    def resume_from(self) -> Path | None:
        """Return the checkpoint folder that the run resumes from, or None."""
        return self.check_start().resume_from

    @property
    def first_step(self) -> int | None:
        """The first step that the run will log; None if it only validates."""
        start = self.check_start()
        return None if self._config.trainer.val_only else start.first_step

    def end(self, error: BaseException | None = None) -> None:
        """At the end of a run: stop the data loader processes, wait for the save in progress, release the folder.

        `error`: the exception that ends the run, if any (see `Saver.close`).
        """
        self.prompts.close()
        if not self._config.trainer.val_only:
            self.saver.close(error)
        if self.run_start is not None:
            self.run_start.close()
            self.run_start = None

    def save(self, groups: WorkerGroups) -> None:
        """Begin to save the state. `actor/huggingface/` in the checkpoint can be used as `model.path`."""
        policy = next(self._workers[role] for role in POLICY_ROLES if role in self._workers)
        parts = {"actor": background_part(groups.actor, policy)}
        if groups.critic is not None:
            parts["critic"] = background_part(groups.critic, self._workers[Role.Critic])
        exports = "hf_model" in self._config.actor_rollout_ref.actor.checkpoint.save_contents
        state = self._snapshot if self._saves_snapshot else self.contents(partials=True)
        assert state is not None
        self.saver.begin(state, parts, ["actor/huggingface"] if exports else [])

    def take_snapshot(self) -> None:
        """Copy the current state, for `restore_snapshot`."""
        self._snapshot = copy.deepcopy(self.contents(partials=False))

    def restore_snapshot(self) -> None:
        """After the current step was given up: restore the last snapshot. Later saves write it.

        The ranks need no restore, because only updates change their state. Neither do the prompts: the run ends.
        """
        assert self._snapshot is not None
        self._saves_snapshot = True
        self.step, self.policy_version, self.kl_controller.value = (
            self._snapshot[name] for name in ("global_steps", "policy_version", "kl_coef")
        )

    def contents(self, partials: bool) -> dict[str, Any]:
        stream = {} if self.stream is None else {"answers": self.stream.state(partials)}
        return stream | {
            "global_steps": self.step,
            "policy_version": self.policy_version,
            "kl_coef": self.kl_controller.value,
            "prompts": self.prompts.state_dict(),
            "dataloader": self.prompts.loader_state(),
        }

    def load(self, groups: WorkerGroups) -> None:
        """Resume from the configured or the newest complete checkpoint, if one exists."""

        def read(folder: Path, state: Mapping[str, Any]) -> None:
            self.step, self.policy_version = int(state["global_steps"]), int(state["policy_version"])
            self.kl_controller.value = state["kl_coef"]
            self._loader.load_state_dict(state["dataloader"])
            self.prompts.load_state_dict(state["prompts"])
            stream = state.get("answers")
            if stream is not None and self.stream is not None:
                self.stream.load(stream)
            elif stream is not None and (prompts := saved_prompts(stream)):  # a sync run generates them again
                self.prompts.put_back(concat_prompts(prompts))
            groups.actor.load_checkpoint(str(folder / "actor"))
            if groups.critic is not None:
                groups.critic.load_checkpoint(str(folder / "critic"))

        load_step(self.resume_from(), read)
        self.saver.newest_step = self.step if self.resume_from() is not None else None


def check_run_start(config: PPOConfig, workers: Mapping[Any, type]) -> RunStart:
    """Run the checks that precede model loading (`RunStart`). `workers`: worker classes by role."""
    trainer = config.trainer
    folders = {f"trainer.{key}": trainer[key] for key in ("rollout_data_dir", "validation_data_dir")}
    return RunStart(trainer, run_parts(config, workers.values()), folders, saves=not trainer.val_only)


class TrainerAttributes:
    """Public attributes of the trainer whose values its collaborators store and use. Subclasses and scripts may read
    and assign them."""

    groups: WorkerGroups
    generator: Generator
    state: TrainerState

    @property
    def actor_wg(self) -> Any:
        """Worker group of the policy. Also available as `actor_rollout_wg`."""
        return self.groups.actor

    @actor_wg.setter
    def actor_wg(self, group: Any) -> None:
        self.groups.actor = group

    actor_rollout_wg = actor_wg

    @property
    def rollout_wg(self) -> Any:
        """Worker group of the rollout engines; the same object as `actor_wg` if they share processes."""
        return self.groups.rollout

    @rollout_wg.setter
    def rollout_wg(self, group: Any) -> None:
        self.groups.rollout = group

    @property
    def ref_policy_wg(self) -> Any:
        """Worker group of the reference policy; the same object as `actor_wg` if the reference is the actor without its
        adapter."""
        return self.groups.reference

    @ref_policy_wg.setter
    def ref_policy_wg(self, group: Any) -> None:
        self.groups.reference = group

    @property
    def critic_wg(self) -> Any:
        """Worker group of the critic, or None."""
        return self.groups.critic

    @critic_wg.setter
    def critic_wg(self, group: Any) -> None:
        self.groups.critic = group

    @property
    def rm_wg(self) -> Any:
        """Worker group of the reward model, or None."""
        return self.groups.reward_model

    @rm_wg.setter
    def rm_wg(self, group: Any) -> None:
        self.groups.reward_model = group

    @property
    def reward_fn(self) -> Any:
        """Reward manager for training batches. Also available as `reward_manager`."""
        return self.generator.reward_fn

    @reward_fn.setter
    def reward_fn(self, manager: Any) -> None:
        self.generator.reward_fn = manager

    reward_manager = reward_fn

    @property
    def global_steps(self) -> int:
        """The current training step, or the last completed one between steps. Also available as `global_step`."""
        return self.state.step

    @global_steps.setter
    def global_steps(self, step: int) -> None:
        self.state.step = step

    global_step = global_steps

    @property
    def policy_version(self) -> int:
        """Number of actor updates so far; the version of the weights that the next sync sends."""
        return self.state.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.state.policy_version = version

    @property
    def kl_ctrl_in_reward(self) -> Any:
        """Controller of the coefficient of the KL penalty in the reward."""
        return self.state.kl_controller

    @kl_ctrl_in_reward.setter
    def kl_ctrl_in_reward(self, controller: Any) -> None:
        self.state.kl_controller = controller
