"""`PPOConfig`, the configuration of `verl.trainer.main_ppo`, with its blocks `data` and `distillation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl.config import names
from verl.config.algorithm import AlgorithmConfig
from verl.config.engine import ModelConfig
from verl.config.roles import ActorConfig, CriticConfig, CustomRewardFunctionConfig, RefConfig, RewardModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.schema import Block, RootConfig, key
from verl.config.trainer import RayInitConfig, RetrieverConfig, SandboxConfig, SandboxFusionConfig, TrainerConfig


@dataclass(kw_only=True, slots=True)
class CustomClassConfig(Block):
    path: str | None = key("Python file (or module) of a custom class.", null="the built-in class", path=True)
    name: str | None = key("Name of the class.", null="the built-in class")


@dataclass(kw_only=True, slots=True)
class SamplerConfig(Block):
    path: str | None = key(
        "Python file (or module) of a sampler class.",
        null="random or sequential, by data.shuffle",
        path=True,
        aliases=("class_path",),
    )
    name: str | None = key("Name of the class.", null="random or sequential, by data.shuffle", aliases=("class_name",))


@dataclass(kw_only=True, slots=True)
class DataConfig(Block):
    train_files: list[str] = key(
        "Training prompts: one path, a list, a folder or a hub name.",
        required="$HOME/data/gsm8k/train.parquet",
        path=True,
    )
    val_files: list[str] = key(
        "Validation prompts, in the forms of train_files; empty: no validation.", null="none", path=True
    )
    prompt_key: str = key("Column of the prompt (a list of {role, content}).")
    system_prompt: str | None = key("System message for prompts without one.", null="none")
    reward_fn_key: str = key("Column with the data source, which selects the reward function.")
    ground_truth_key: str = key("Column of the correct answer, for rows without reward_model.ground_truth.")
    train_batch_size: int = key("Prompts per training step.", min=1)
    gen_batch_size: int = key(
        "Prompts per generation batch with algorithm.filter_groups.", follows="data.train_batch_size", min=1
    )
    val_batch_size: int | None = key("Prompts per validation batch.", null="the whole set at once", min=1)
    max_prompt_length: int = key("Largest prompt length in tokens.", min=1)
    max_response_length: int = key("Largest response length in tokens (all turns together).", min=1)
    max_start_length: int | None = key(
        "Search agent: prompt length. If set, max_prompt_length limits the context, max_response_length each turn.",
        null="max_prompt_length limits the prompt, max_response_length all turns together",
        min=1,
    )
    max_turn_length: int = key(
        "Search agent: largest number of tokens the model generates per turn.",
        follows="data.max_response_length",
        min=1,
    )
    max_obs_length: int = key("Search agent: largest number of tokens of search results per turn.", min=1)
    filter_overlong_prompts: bool = key("Drop prompts longer than max_prompt_length before training.")
    truncation: str = key(
        "Prompts longer than max_prompt_length: raise an error, or cut tokens on the left, right or in the middle.",
        choices=("error", "left", "right", "middle"),
    )
    shuffle: bool = key("Shuffle the training prompts every epoch.")
    seed: int = key("Seed of the run: prompt order, mini-batches and sampling.", min=0)
    dataloader_num_workers: int = key("Data loader processes.", min=0)
    train_max_samples: int = key("Use only the first rows of the training set; -1: all.", min=-1)
    val_max_samples: int = key("Use only the first rows of the validation set; -1: all.", min=-1)
    return_raw_chat: bool = key("Keep the messages of prompts (column raw_prompt); on with reward models and agents.")
    apply_chat_template_kwargs: dict[str, Any] = key("Arguments for the tokenizer's chat template.")
    custom_cls: CustomClassConfig = key("Custom dataset class.")
    sampler: SamplerConfig = key("Custom sampler (e.g. curriculum, weighted).")


@dataclass(kw_only=True, slots=True)
class TeacherModelConfig(Block):
    model_path: str | None = key("Local folder, hub name or URL of the teacher.", null="not set", path=True)
    url: list[str] | None = key(
        "URLs of servers with the teacher (`python -m verl.inference.server`, `vllm serve`) instead of model_path.",
        null="this run loads the teacher",
    )
    num_replicas: int | None = key(
        "Copies of the teacher's weights, each sharded over ranks / num_replicas ranks.",
        null="given by fsdp_size",
        min=1,
    )
    key: str | None = key(  # last: shadows the function `key`
        "`data_source` (column data.reward_fn_key) of the rows for this teacher.",
        null="all rows without another teacher",
    )


@dataclass(kw_only=True, slots=True)
class TeacherConfig(RefConfig):
    """Engine keys of all local teachers; the same as the reference's."""


@dataclass(kw_only=True, slots=True)
class DistillationLossConfig(Block):
    loss_mode: str = key(
        "KL to the teacher: estimated from the sampled token (+: unbiased gradient), or over the topk tokens.",
        choices=(*names.KL_LOSS_TYPES, *names.TOP_K_KLS),
    )
    topk: int = key("Teacher's most likely tokens used by the topk modes.", min=1)
    distillation_loss_coef: float = key("Coefficient of the KL in the loss or reward.", min=0)
    use_task_rewards: bool = key("Also train on task rewards; False: only on the teachers, without scoring.")
    as_reward: bool = key("Subtract the KL from token rewards, before advantages; False: add it to the loss.")

    @property
    def over_top_tokens(self) -> bool:
        """Whether the loss needs the teacher's top-k tokens, not only the sampled ones."""
        return self.loss_mode in names.TOP_K_KLS


@dataclass(kw_only=True, slots=True)
class DistillationConfig(Block):
    enabled: bool = key("On-policy distillation: teachers score the student's tokens.", aliases=("enable",))
    distillation_loss: DistillationLossConfig = key("Distillation loss.")
    teacher_models: dict[str, TeacherModelConfig] = key(
        "Teachers by name, e.g. {math: {key: openai/gsm8k, model_path: Qwen/Qwen2.5-7B-Instruct}}."
    )
    teacher: TeacherConfig = key("Engine of local teachers; unset keys are taken from the actor.")

    @property
    def scores_responses(self) -> bool:
        """Whether responses get task rewards."""
        return not self.enabled or self.distillation_loss.use_task_rewards

    @property
    def has_advantages(self) -> bool:
        """Whether there are rewards from which advantages are estimated."""
        return self.scores_responses or self.distillation_loss.as_reward

    @property
    def loss(self) -> DistillationLossConfig | None:
        """The distillation loss if it is part of the training loss, else None."""
        return self.distillation_loss if self.enabled and not self.distillation_loss.as_reward else None

    @property
    def local_teachers(self) -> Mapping[str, TeacherModelConfig]:
        """Teachers whose weights this run loads, by name."""
        return {name: teacher for name, teacher in self.teacher_models.items() if self.enabled and not teacher.url}

    def engine_of(self, name: str, ranks: int) -> TeacherConfig:
        """Return the engine keys of a teacher on this number of ranks."""
        copies = self.teacher_models[name].num_replicas
        if copies is None:
            return self.teacher
        return replace(self.teacher, fsdp_config=replace(self.teacher.fsdp_config, fsdp_size=max(1, ranks // copies)))


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
    ray_init: RayInitConfig = key("How Ray is started.")
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
