"""The roles: `actor_rollout_ref.{actor,ref}.*`, `critic.*`, `reward_model.*`, and `custom_reward_function.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config import names
from verl.config.algorithm import NO_FULL_KL
from verl.config.engine import (
    PREFIX_CHOICES,
    PREFIX_SYNONYMS,
    CheckpointConfig,
    CriticModelConfig,
    FSDPConfig,
    MegatronConfig,
    OptimConfig,
    RewardModelModelConfig,
)
from verl.config.schema import Block, key

_ACTOR = "actor_rollout_ref.actor"


@dataclass(kw_only=True, slots=True)
class PolicyLossConfig(Block):
    loss_mode: str = key("Policy loss.", choices=names.POLICY_LOSSES, extendable=True)
    clip_cov_ratio: float = key("clip_cov: fraction of tokens whose gradient is removed.", min=0, max=1)
    clip_cov_lb: float = key("clip_cov: smallest covariance of a token whose gradient is removed.")
    clip_cov_ub: float = key("clip_cov: largest covariance of a token whose gradient is removed.")
    kl_cov_ratio: float = key("kl_cov: fraction of tokens with the KL penalty.", min=0, max=1)
    ppo_kl_coef: float = key("kl_cov: coefficient of the KL penalty.", min=0)
    tau_pos: float = key("sapo: temperature of the gate for positive advantages.", above=0)
    tau_neg: float = key("sapo: temperature of the gate for negative advantages.", above=0)


@dataclass(kw_only=True, slots=True)
class RouterReplayConfig(Block):
    mode: str = key(
        "Experts used in an update: routed anew, or replayed from the old log-prob pass (R2) or the rollout (R3).",
        choices=("disabled", "R2", "R3"),
    )


@dataclass(kw_only=True, slots=True)
class ActorConfig(Block):
    strategy: str = key("Training engine (fsdp and fsdp2 are the same one).", choices=names.STRATEGIES)
    ppo_mini_batch_size: int = key("Prompts per optimizer step, over all ranks; divides data.train_batch_size.", min=1)
    ppo_micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward-backward pass.", null="4, at most the samples of a mini-batch on a rank", min=1
    )
    ppo_micro_batch_size: int | None = key(
        "ppo_micro_batch_size_per_gpu summed over all ranks; converted to that key.", null="not used", min=1
    )
    ppo_epochs: int = key("PPO epochs: passes over each batch.", min=1)
    use_dynamic_bsz: bool = key("Fill micro-batches up to a token budget instead of a fixed number of samples.")
    ppo_max_token_len_per_gpu: int = key("Token budget per rank and forward-backward pass.", min=1)
    clip_ratio: float = key(
        "Clip range: largest distance of the probability ratio from 1.",
        null="the default of the policy loss (vanilla: 0.2)",
        above=0,
    )
    clip_ratio_low: float = key("Lower clip distance.", follows="actor_rollout_ref.actor.clip_ratio", min=0)
    clip_ratio_high: float = key("Upper clip distance.", follows="actor_rollout_ref.actor.clip_ratio", min=0)
    clip_ratio_c: float = key(
        "Dual clip (arXiv 1912.09729): for a negative advantage, the loss is at most clip_ratio_c × |advantage|.",
        above=1,
    )
    loss_agg_mode: str = key(
        "Aggregation of token losses.",
        null="the default of the policy loss (vanilla: token-mean)",
        choices=names.LOSS_AGG_MODES,
    )
    loss_scale_factor: float = key("Divisor of seq-mean-token-sum-norm.", follows="data.max_response_length", above=0)
    policy_loss: PolicyLossConfig = key("The policy loss and its parameters.")
    old_log_prob_from_update: bool | None = key(
        "Take old log-probs from the update's forward pass; requires one optimizer step per batch.",
        null="if that gives the same result",
    )
    entropy_coeff: float = key("Coefficient of the entropy bonus.")
    use_kl_loss: bool = key("Add the KL to the reference policy to the loss; starts a reference policy.")
    kl_loss_coef: float = key("Coefficient of the KL loss.", min=0)
    kl_loss_type: str = key(
        "KL estimator; kl and a trailing + have the unbiased KL gradient; the expected gradient of k1 alone is 0.",
        choices=names.KL_LOSS_TYPES,
        refused={"full": NO_FULL_KL},
    )
    grad_clip: float = key("Gradients are clipped to this norm.", above=0, aliases=("max_grad_norm",))
    ulysses_sequence_parallel_size: int = key(
        "Ranks each sequence is split over (Ulysses, fsdp).",
        min=1,
        aliases=("fsdp_config.ulysses_sequence_parallel_size",),
    )
    use_torch_compile: bool = key("torch.compile the layers (packed tokens on CUDA only); adds about 30 s at start.")
    use_prefix_grouper: str = key(
        "Compute common prefixes of rows once (packed tokens, fsdp); auto: if that saves 10 % of the tokens.",
        choices=PREFIX_CHOICES,
        synonyms=PREFIX_SYNONYMS,
    )
    router_replay: RouterReplayConfig = key(
        "Mixture-of-experts: replay the routing of an earlier pass in updates.",
        aliases=("megatron_config.router_replay", "megatron.router_replay"),
    )
    optim: OptimConfig = key("Optimizer and schedule.")
    fsdp_config: FSDPConfig = key("FSDP engine.")
    megatron_config: MegatronConfig = key("Megatron engine.", aliases=("megatron",))
    checkpoint: CheckpointConfig = key("Contents of checkpoints.")


@dataclass(kw_only=True, slots=True)
class RefConfig(Block):
    strategy: str = key("Training engine.", follows=f"{_ACTOR}.strategy", choices=names.STRATEGIES)
    log_prob_micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward pass.", follows=f"{_ACTOR}.ppo_micro_batch_size_per_gpu", min=1
    )
    log_prob_micro_batch_size: int | None = key(
        "log_prob_micro_batch_size_per_gpu summed over all ranks; converted to that key.", null="not used", min=1
    )
    log_prob_use_dynamic_bsz: bool = key(
        "Fill micro-batches up to a token budget.", follows=f"{_ACTOR}.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int = key(
        "Token budget per rank and forward pass.", follows=f"{_ACTOR}.ppo_max_token_len_per_gpu", min=1
    )
    ulysses_sequence_parallel_size: int = key(
        "Ranks each sequence is split over (Ulysses, fsdp).",
        follows=f"{_ACTOR}.ulysses_sequence_parallel_size",
        min=1,
        aliases=("fsdp_config.ulysses_sequence_parallel_size",),
    )
    use_torch_compile: bool = key(
        "Compile the layers (packed tokens on CUDA only).", follows=f"{_ACTOR}.use_torch_compile"
    )
    use_prefix_grouper: str = key(
        "Compute common prefixes of rows once.",
        follows=f"{_ACTOR}.use_prefix_grouper",
        choices=PREFIX_CHOICES,
        synonyms=PREFIX_SYNONYMS,
    )
    fsdp_config: FSDPConfig = key("FSDP engine.", follows=f"{_ACTOR}.fsdp_config")
    megatron_config: MegatronConfig = key(
        "Megatron engine.", follows=f"{_ACTOR}.megatron_config", aliases=("megatron",)
    )


@dataclass(kw_only=True, slots=True)
class CriticConfig(Block):
    enable: bool = key("Train a critic (critic=null disables it as well).", null="if the estimator needs it (gae)")
    strategy: str = key("Training engine.", choices=names.STRATEGIES)
    model: CriticModelConfig = key("Model below the value head.")
    ppo_mini_batch_size: int = key(
        "Prompts per optimizer step, over all ranks; divides data.train_batch_size.",
        follows=f"{_ACTOR}.ppo_mini_batch_size",
        min=1,
    )
    ppo_micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward-backward pass.", null="4, at most the samples of a mini-batch on a rank", min=1
    )
    ppo_micro_batch_size: int | None = key(
        "ppo_micro_batch_size_per_gpu summed over all ranks; converted to that key.", null="not used", min=1
    )
    forward_micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward pass when values are computed.",
        follows="critic.ppo_micro_batch_size_per_gpu",
        min=1,
    )
    forward_micro_batch_size: int | None = key(
        "forward_micro_batch_size_per_gpu summed over all ranks; converted to that key.", null="not used", min=1
    )
    ppo_epochs: int = key("PPO epochs: passes over each batch.", follows=f"{_ACTOR}.ppo_epochs", min=1)
    use_dynamic_bsz: bool = key("Fill micro-batches up to a token budget.", follows=f"{_ACTOR}.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int = key(
        "Token budget per rank and forward-backward pass.", follows=f"{_ACTOR}.ppo_max_token_len_per_gpu", min=1
    )
    forward_max_token_len_per_gpu: int = key(
        "Token budget per rank when values are computed.", follows="critic.ppo_max_token_len_per_gpu", min=1
    )
    cliprange_value: float = key("Clip range: largest change of a value from the old value.", above=0)
    loss_agg_mode: str = key(
        "Aggregation of token losses.", follows=f"{_ACTOR}.loss_agg_mode", choices=names.LOSS_AGG_MODES
    )
    loss_scale_factor: float = key(
        "Divisor of seq-mean-token-sum-norm.", follows=f"{_ACTOR}.loss_scale_factor", above=0
    )
    grad_clip: float = key("Gradients are clipped to this norm.", above=0, aliases=("max_grad_norm",))
    ulysses_sequence_parallel_size: int = key(
        "Ranks each sequence is split over (Ulysses, fsdp).",
        min=1,
        aliases=("fsdp_config.ulysses_sequence_parallel_size",),
    )
    use_torch_compile: bool = key(
        "Compile the layers (packed tokens on CUDA only).", follows=f"{_ACTOR}.use_torch_compile"
    )
    use_prefix_grouper: str = key(
        "Compute common prefixes of rows once.",
        follows=f"{_ACTOR}.use_prefix_grouper",
        choices=PREFIX_CHOICES,
        synonyms=PREFIX_SYNONYMS,
    )
    optim: OptimConfig = key("Optimizer and schedule.")
    fsdp_config: FSDPConfig = key("FSDP engine.")
    megatron_config: MegatronConfig = key("Megatron engine.", aliases=("megatron",))
    checkpoint: CheckpointConfig = key("Contents of checkpoints.")


@dataclass(kw_only=True, slots=True)
class OverlongBufferConfig(Block):
    enable: bool = key("Penalise responses close to the length limit (dapo reward manager).")
    len: int = key("Tokens before the limit over which the penalty grows linearly.", min=1)
    penalty_factor: float = key("Penalty at the limit.", min=0)
    log: bool = key("Log the penalty as a metric.")


@dataclass(kw_only=True, slots=True)
class JudgeConfig(Block):
    enable: bool = key("Score responses with a language model as judge.")
    template: str = key("Jinja prompt (of prompt, messages, answer, ground_truth, extra_info): text or file (*.jinja).")
    system: str | None = key("System message of the judge.", null="none")
    parser: str = key("Parser of the judgement.", choices=("json", "regex"))
    field: str = key("json: field with the score in the last JSON object of the judgement.")
    json_schema: dict[str, Any] = key("json: schema of the judgement; {}: a reason and the score.")
    constrain: bool = key("json: constrain decoding to json_schema (response_format).")
    pattern: str = key("regex: pattern whose first group is the score; the last match is used.")
    low: float = key("Lowest score, mapped to 0; scores outside of the range are invalid.")
    high: float = key("Highest score, mapped to 1.")
    n: int = key("Judgements per response; the score is their mean.", min=1)
    max_tokens: int = key("Largest length of a judgement in tokens.", min=1)
    temperature: float = key("Sampling temperature of the judge.", min=0)
    model: str | None = key("Model name on the server.", null="the server's only model")


@dataclass(kw_only=True, slots=True)
class RewardRolloutConfig(Block):
    name: str = key(
        "Engine that serves the reward model.",
        choices=("native",),
        refused={
            other: ("only the native engine serves a reward model", "Start it yourself and set reward_model.url")
            for other in ("vllm", "sglang", "trtllm", "hf")
        },
    )
    gpu_memory_utilization: float = key("Fraction of GPU memory for weights and KV cache.", above=0, max=1)
    max_model_len: int | None = key("Largest length of prompt and judgement.", null="the model's context length", min=1)
    max_num_seqs: int = key("Concurrent requests.", min=1)
    dtype: str = key("Precision of the weights.", choices=("auto", "bfloat16", "float16", "float32"))
    enforce_eager: bool = key("Disable CUDA graphs.")


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(Block):
    enable: bool = key("Run a reward model on devices of this run.")
    path: str | None = key(
        "Local folder, hub name or URL of the reward model.",
        null="not set",
        path=True,
        aliases=("model.path", "model_path"),
    )
    url: str | None = key(
        "Server with a reward model or judge (host:port or URL); passed to reward functions as reward_router_address.",
        null="none",
    )
    model: RewardModelModelConfig = key("Model of the reward model.")
    strategy: str = key("Training engine.", follows="actor_rollout_ref.actor.strategy", choices=names.STRATEGIES)
    micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward pass.", follows="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", min=1
    )
    micro_batch_size: int | None = key(
        "micro_batch_size_per_gpu summed over all ranks; converted to that key.", null="not used", min=1
    )
    use_dynamic_bsz: bool = key(
        "Fill micro-batches up to a token budget.", follows="actor_rollout_ref.actor.use_dynamic_bsz"
    )
    forward_max_token_len_per_gpu: int = key(
        "Token budget per rank and forward pass.", follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu", min=1
    )
    max_length: int | None = key(
        "Largest input length if the tokenizers of reward model and policy differ; longer texts lose their beginning.",
        null="model_max_length of the reward model's tokenizer",
        min=1,
    )
    use_torch_compile: bool = key(
        "Compile the layers (packed tokens on CUDA only).", follows="actor_rollout_ref.actor.use_torch_compile"
    )
    use_prefix_grouper: str = key(
        "Compute common prefixes of rows once.",
        follows="actor_rollout_ref.actor.use_prefix_grouper",
        choices=PREFIX_CHOICES,
        synonyms=PREFIX_SYNONYMS,
    )
    ulysses_sequence_parallel_size: int = key(
        "Ranks each sequence is split over (Ulysses, fsdp).",
        min=1,
        aliases=("fsdp_config.ulysses_sequence_parallel_size",),
    )
    fsdp_config: FSDPConfig = key("FSDP engine.")
    megatron_config: MegatronConfig = key("Megatron engine.", aliases=("megatron",))
    judge: JudgeConfig = key("Language model as judge.")
    rollout: RewardRolloutConfig = key("Serving of the reward model, for a judge or custom_reward_function.")
    enable_resource_pool: bool = key("Run the reward model on separate devices (reward_pool).")
    n_gpus_per_node: int = key("Devices per node of reward_pool.", follows="trainer.n_gpus_per_node", min=1)
    nnodes: int = key("Nodes of reward_pool.", min=1)
    reward_manager: str = key(
        "Reward manager: naive (per response), batch (per list), prime (strict limits), dapo (overlong_buffer).",
        choices=names.REWARD_MANAGERS,
        extendable=True,
        aliases=("../reward.reward_manager.name",),
    )
    reward_kwargs: dict[str, Any] = key(
        "Arguments of the manager: timeout (s per call), num_processes, memory_limit_gb (per process), batch_size.",
        aliases=("../reward.reward_kwargs",),
    )
    skip_special_tokens: bool = key("Remove special tokens (end of turn, tool call …) from texts for reward functions.")
    overlap: bool = key("Score responses as they finish, while others are still generated.")
    overlong_buffer: OverlongBufferConfig = key("Penalty for overlong responses.")
    on_error: str = key(
        "If a reward function fails (exception, timeout, crash, NaN): stop the run, score 0, or mask the sample.",
        choices=("fail", "zero", "mask"),
    )


@dataclass(kw_only=True, slots=True)
class CustomRewardFunctionConfig(Block):
    path: str | None = key("Python file (or module) of a reward function.", null="built-in, by data_source", path=True)
    name: str = key("Name of the function.")
    reward_kwargs: dict[str, Any] = key("Keyword arguments of every call, e.g. format_score.")
