"""`PPOConfig`: the whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.algorithm import AlgorithmConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.engine import ModelConfig
from verl.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from verl.config.roles import ActorConfig, CriticConfig, RefConfig
from verl.config.rollout import RolloutConfig
from verl.config.schema import Block, WholeConfig, key
from verl.config.trainer import RayInitConfig, RetrieverConfig, SandboxConfig, SandboxFusionConfig, TrainerConfig


@dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig(Block):
    model: ModelConfig = key("The model that is trained, generated with and referred to.")
    actor: ActorConfig = key("Updating the policy.")
    rollout: RolloutConfig = key("Generating answers.")
    ref: RefConfig = key("The reference policy.")


@dataclass(kw_only=True, slots=True)
class PPOConfig(WholeConfig):
    algorithm: AlgorithmConfig = key("From scores to advantages.")
    data: DataConfig = key("Prompts and batches.")
    actor_rollout_ref: ActorRolloutRefConfig = key("The policy: training, generation, reference.")
    critic: CriticConfig = key("The value model.")
    reward_model: RewardModelConfig = key("Scores: reward manager and reward model.", aliases=("reward.reward_model",))
    distillation: DistillationConfig = key("Learning from teachers.")
    custom_reward_function: CustomRewardFunctionConfig = key(
        "A reward function of your own.", aliases=("reward.custom_reward_function",)
    )
    trainer: TrainerConfig = key("The run.")
    ray_init: RayInitConfig = key("Starting Ray.")
    resource_pool_spec: dict[str, list[int]] = key(
        "Devices per node of every pool, e.g. {global_pool: [8, 8], reward_pool: [4]}.",
        null="global_pool of nnodes × n_gpus_per_node (and reward_pool, when enabled)",
    )
    role_mapping: dict[str, str] = key(
        "Pool of each role (actor, rollout, ref, critic, reward_model, teacher), e.g. {critic: critic_pool}.",
        null="everything on global_pool, the reward model on reward_pool where there is one",
    )
    external_libs: list[str] = key(
        "Modules imported on controller and workers first, so that what they register exists everywhere.", null="none"
    )
    do_search: bool = key("Let the model search between turns (search agent); sets rollout.mode=async.")
    max_turns: int = key("Searches of one answer; then a last turn without.", min=1)
    retriever: RetrieverConfig = key("The search service.")
    sandbox: SandboxConfig = key("Code that a model wrote, run on this machine.")
    sandbox_fusion: SandboxFusionConfig = key(
        "The same, run by a server.", aliases=("reward_model.sandbox_fusion", "reward.sandbox_fusion")
    )
    custom: dict[str, Any] = key("Free-form, for your own code.")
