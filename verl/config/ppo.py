"""`PPOConfig`: the configuration of `verl.trainer.main_ppo`."""

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
from verl.config.schema import Block, RootConfig, key
from verl.config.trainer import RayInitConfig, RetrieverConfig, SandboxConfig, SandboxFusionConfig, TrainerConfig


@dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig(Block):
    model: ModelConfig = key("Model of actor, rollout and reference.")
    actor: ActorConfig = key("Policy update.")
    rollout: RolloutConfig = key("Generation.")
    ref: RefConfig = key("The reference policy.")


@dataclass(kw_only=True, slots=True)
class PPOConfig(RootConfig):
    algorithm: AlgorithmConfig = key("Advantages, KL penalty, rollout correction.")
    data: DataConfig = key("Prompts and batches.")
    actor_rollout_ref: ActorRolloutRefConfig = key("Policy: training, generation, reference.")
    critic: CriticConfig = key("Value model.")
    reward_model: RewardModelConfig = key("Reward manager and reward model.", aliases=("reward.reward_model",))
    distillation: DistillationConfig = key("On-policy distillation.")
    custom_reward_function: CustomRewardFunctionConfig = key(
        "Custom reward function.", aliases=("reward.custom_reward_function",)
    )
    trainer: TrainerConfig = key("Run: devices, steps, checkpoints, trackers.")
    ray_init: RayInitConfig = key("Start of Ray.")
    resource_pool_spec: dict[str, list[int]] = key(
        "Devices per node of each pool, e.g. {global_pool: [8, 8], reward_pool: [4]}.",
        null="global_pool of nnodes × n_gpus_per_node (and reward_pool if enabled)",
    )
    role_mapping: dict[str, str] = key(
        "Pool of each role (actor, rollout, ref, critic, reward_model, teacher), e.g. {critic: critic_pool}.",
        null="all on global_pool, the reward model on reward_pool if there is one",
    )
    external_libs: list[str] = key(
        "Modules imported first on controller and workers, e.g. to register estimators or losses.", null="none"
    )
    do_search: bool = key("Use the search agent; sets rollout.mode=async.")
    max_turns: int = key("Largest number of searches per response; followed by a final turn without search.", min=1)
    retriever: RetrieverConfig = key("Search service.")
    sandbox: SandboxConfig = key("Local sandbox for code written by the model.")
    sandbox_fusion: SandboxFusionConfig = key(
        "Remote sandbox for code written by the model.",
        aliases=("reward_model.sandbox_fusion", "reward.sandbox_fusion"),
    )
    custom: dict[str, Any] = key("Free-form values for user code.")
