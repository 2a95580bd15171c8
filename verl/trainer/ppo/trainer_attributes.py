"""Public attributes of `RayPPOTrainer` whose values are stored in one of its collaborators."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.generator import Generator
from verl.trainer.ppo.state import TrainerState
from verl.trainer.ppo.worker_groups import WorkerGroups

__all__ = ["TrainerAttributes"]


class TrainerAttributes:
    """Attributes that subclasses and scripts read and assign on the trainer.

    The collaborators use the same values (for checkpoints, weight sync and recovery), so each value has one owner, and
    an assignment on the trainer replaces it there.
    """

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
        """Worker group of the reference policy; the same object as `actor_wg` if the actor without adapter is it."""
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
