"""Typed configuration: one declaration per key, one strict load, all problems at once. Imports no torch and no ray."""

from verl.config.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    GDPOConfig,
    KLControllerConfig,
    RolloutCorrectionConfig,
    StateMaskingConfig,
)
from verl.config.engine import (
    CheckpointConfig,
    CriticModelConfig,
    FSDPConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    RewardModelModelConfig,
)
from verl.config.generation import EvalConfig, GenerationConfig
from verl.config.layout import Layout, active_roles, layout_of
from verl.config.load import as_config, load_config
from verl.config.plan import BatchPlan, UpdatePlan, batch_plan
from verl.config.ppo import ActorRolloutRefConfig, CustomClassConfig, DataConfig, PPOConfig, SamplerConfig
from verl.config.problems import ConfigError, Problem
from verl.config.rm import RMConfig, RMDataConfig
from verl.config.roles import (
    ActorConfig,
    CriticConfig,
    CustomRewardFunctionConfig,
    OverlongBufferConfig,
    PolicyLossConfig,
    RefConfig,
    RewardModelConfig,
)
from verl.config.rollout import AgentConfig, GeneratorConfig, MultiTurnConfig, RolloutConfig, ValKwargsConfig
from verl.config.sft import SFTConfig, SFTDataConfig
from verl.config.supervised import SupervisedConfig, SupervisedDataConfig
from verl.config.trainer import (
    RayInitConfig,
    RetrieverConfig,
    RunConfig,
    SandboxConfig,
    SandboxFusionConfig,
    TrainerConfig,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "BatchPlan",
    "CheckpointConfig",
    "ConfigError",
    "CriticConfig",
    "CriticModelConfig",
    "CustomClassConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "EvalConfig",
    "FSDPConfig",
    "FilterGroupsConfig",
    "GDPOConfig",
    "GenerationConfig",
    "GeneratorConfig",
    "KLControllerConfig",
    "Layout",
    "MegatronConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PPOConfig",
    "PolicyLossConfig",
    "Problem",
    "RMConfig",
    "RMDataConfig",
    "RayInitConfig",
    "RefConfig",
    "RetrieverConfig",
    "RewardModelConfig",
    "RewardModelModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SamplerConfig",
    "SandboxConfig",
    "SandboxFusionConfig",
    "StateMaskingConfig",
    "SupervisedConfig",
    "SupervisedDataConfig",
    "TrainerConfig",
    "UpdatePlan",
    "ValKwargsConfig",
    "active_roles",
    "as_config",
    "batch_plan",
    "layout_of",
    "load_config",
]
