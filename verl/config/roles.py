"""`actor_rollout_ref.actor.*`: how the policy is updated."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.algorithm import NO_FULL_KL
from verl.config.engine import CheckpointConfig, CriticModelConfig, FSDPConfig, MegatronConfig, OptimConfig
from verl.config.schema import Block, key

_ACTOR = "actor_rollout_ref.actor"


@dataclass(kw_only=True, slots=True)
class PolicyLossConfig(Block):
    loss_mode: str = key("Which policy loss.", choices=names.POLICY_LOSSES, extendable=True)
    clip_cov_ratio: float = key("clip_cov: share of tokens whose gradient is cut.", min=0, max=1)
    clip_cov_lb: float = key("clip_cov: lowest covariance that may be cut.")
    clip_cov_ub: float = key("clip_cov: highest covariance that may be cut.")
    kl_cov_ratio: float = key("kl_cov: share of tokens that get the KL penalty.", min=0, max=1)
    ppo_kl_coef: float = key("kl_cov: coefficient of that penalty.", min=0)
    tau_pos: float = key("sapo: temperature of the gate for positive advantages.", above=0)
    tau_neg: float = key("sapo: temperature of the gate for negative advantages.", above=0)


@dataclass(kw_only=True, slots=True)
class RouterReplayConfig(Block):
    mode: str = key(
        "Experts of an update: its own choice, or of all that it knows those of the old log-probs (R2), of the "
        "generation (R3).",
        choices=("disabled", "R2", "R3"),
    )


@dataclass(kw_only=True, slots=True)
class ActorConfig(Block):
    strategy: str = key("Training engine (fsdp and fsdp2 are the same one).", choices=names.STRATEGIES)
    ppo_mini_batch_size: int = key("Prompts per optimizer step, over all ranks; divides data.train_batch_size.", min=1)
    ppo_micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward-backward pass.", null="4, or the mini-batch's share where that is less", min=1
    )
    ppo_micro_batch_size: int | None = key(
        "The same, counted over all ranks; folded into ppo_micro_batch_size_per_gpu.", null="not used", min=1
    )
    ppo_epochs: int = key("Passes over each batch.", min=1)
    use_dynamic_bsz: bool = key("Fill micro-batches up to a token budget instead of a number of samples.")
    ppo_max_token_len_per_gpu: int = key("That budget: tokens per rank and forward-backward pass.", min=1)
    clip_ratio: float = key(
        "How far the ratio may move from 1, down and up.", null="the policy loss's own (vanilla: 0.2)", above=0
    )
    clip_ratio_low: float = key("The same, downwards.", null="", follows="actor_rollout_ref.actor.clip_ratio", min=0)
    clip_ratio_high: float = key("The same, upwards.", null="", follows="actor_rollout_ref.actor.clip_ratio", min=0)
    clip_ratio_c: float = key("Dual clip: bound on the loss of a negative advantage.", above=1)
    loss_agg_mode: str = key(
        "How token losses become one number.",
        null="the policy loss's own (vanilla: token-mean)",
        choices=names.LOSS_AGG_MODES,
    )
    loss_scale_factor: float = key(
        "Divisor of seq-mean-token-sum-norm.", null="", follows="data.max_response_length", above=0
    )
    policy_loss: PolicyLossConfig = key("The policy loss and its parameters.")
    old_log_prob_from_update: bool | None = key(
        "Take old log-probs from the update's own forward pass; needs one optimizer step per batch.",
        null="wherever that gives the same result",
    )
    entropy_coeff: float = key("Weight of the entropy bonus.")
    use_kl_loss: bool = key("Add the KL to the reference to the loss; starts a reference policy.")
    kl_loss_coef: float = key("Weight of that loss.", min=0)
    kl_loss_type: str = key(
        "Estimate of that KL; kl and a trailing + have the KL's own gradient, bare k1 none on average.",
        choices=names.KL_LOSS_TYPES,
        refused={"full": NO_FULL_KL},
    )
    grad_clip: float = key("Largest gradient norm.", above=0, aliases=("max_grad_norm",))
    ulysses_sequence_parallel_size: int = key(
        "Ranks each sequence is split over (Ulysses, fsdp).",
        min=1,
        aliases=("fsdp_config.ulysses_sequence_parallel_size",),
    )
    use_torch_compile: bool = key(
        "Compile the layers with torch.compile (packed tokens on CUDA only): faster passes for half a minute at start."
    )
    router_replay: RouterReplayConfig = key(
        "Mixtures: experts of an update that are those of an earlier pass.",
        aliases=("megatron_config.router_replay", "megatron.router_replay"),
    )
    optim: OptimConfig = key("Optimizer and schedule.")
    fsdp_config: FSDPConfig = key("The fsdp engine.")
    megatron_config: MegatronConfig = key("The megatron engine.", aliases=("megatron",))
    checkpoint: CheckpointConfig = key("What is saved and loaded.")


@dataclass(kw_only=True, slots=True)
class RefConfig(Block):
    strategy: str = key("Engine.", null="", follows=f"{_ACTOR}.strategy", choices=names.STRATEGIES)
    log_prob_micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward pass.", null="", follows=f"{_ACTOR}.ppo_micro_batch_size_per_gpu", min=1
    )
    log_prob_micro_batch_size: int | None = key(
        "The same, counted over all ranks; folded into log_prob_micro_batch_size_per_gpu.", null="not used", min=1
    )
    log_prob_use_dynamic_bsz: bool = key(
        "Fill micro-batches up to a token budget.", null="", follows=f"{_ACTOR}.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int = key(
        "That budget: tokens per rank and forward pass.",
        null="",
        follows=f"{_ACTOR}.ppo_max_token_len_per_gpu",
        min=1,
    )
    ulysses_sequence_parallel_size: int = key(
        "Ranks each sequence is split over (Ulysses, fsdp).",
        null="",
        follows=f"{_ACTOR}.ulysses_sequence_parallel_size",
        min=1,
        aliases=("fsdp_config.ulysses_sequence_parallel_size",),
    )
    use_torch_compile: bool = key(
        "Compile the layers (packed tokens on CUDA only).", null="", follows=f"{_ACTOR}.use_torch_compile"
    )
    fsdp_config: FSDPConfig = key("The fsdp engine.", follows=f"{_ACTOR}.fsdp_config")
    megatron_config: MegatronConfig = key(
        "The megatron engine.", follows=f"{_ACTOR}.megatron_config", aliases=("megatron",)
    )


@dataclass(kw_only=True, slots=True)
class CriticConfig(Block):
    enable: bool = key("Train a critic (critic=null turns it off too).", null="when the estimator needs it (gae)")
    strategy: str = key("Training engine.", choices=names.STRATEGIES)
    model: CriticModelConfig = key("The model under the value head.")
    ppo_mini_batch_size: int = key(
        "Prompts per optimizer step, over all ranks; divides data.train_batch_size.",
        null="",
        follows=f"{_ACTOR}.ppo_mini_batch_size",
        min=1,
    )
    ppo_micro_batch_size_per_gpu: int = key(
        "Samples per rank and forward-backward pass.", null="4, or the mini-batch's share where that is less", min=1
    )
    ppo_micro_batch_size: int | None = key(
        "The same, counted over all ranks; folded into ppo_micro_batch_size_per_gpu.", null="not used", min=1
    )
    forward_micro_batch_size_per_gpu: int = key(
        "Samples per rank when values are computed.", null="", follows="critic.ppo_micro_batch_size_per_gpu", min=1
    )
    forward_micro_batch_size: int | None = key(
        "The same, counted over all ranks; folded into forward_micro_batch_size_per_gpu.", null="not used", min=1
    )
    ppo_epochs: int = key("Passes over each batch.", null="", follows=f"{_ACTOR}.ppo_epochs", min=1)
    use_dynamic_bsz: bool = key(
        "Fill micro-batches up to a token budget.", null="", follows=f"{_ACTOR}.use_dynamic_bsz"
    )
    ppo_max_token_len_per_gpu: int = key(
        "That budget: tokens per rank and forward-backward pass.",
        null="",
        follows=f"{_ACTOR}.ppo_max_token_len_per_gpu",
        min=1,
    )
    forward_max_token_len_per_gpu: int = key(
        "The budget when values are computed.", null="", follows="critic.ppo_max_token_len_per_gpu", min=1
    )
    cliprange_value: float = key("How far a value may move from the old one.", above=0)
    loss_agg_mode: str = key(
        "How token losses become one number.",
        null="",
        follows=f"{_ACTOR}.loss_agg_mode",
        choices=names.LOSS_AGG_MODES,
    )
    loss_scale_factor: float = key(
        "Divisor of seq-mean-token-sum-norm.", null="", follows=f"{_ACTOR}.loss_scale_factor", above=0
    )
    grad_clip: float = key("Largest gradient norm.", above=0, aliases=("max_grad_norm",))
    ulysses_sequence_parallel_size: int = key(
        "Ranks each sequence is split over (Ulysses, fsdp).",
        min=1,
        aliases=("fsdp_config.ulysses_sequence_parallel_size",),
    )
    use_torch_compile: bool = key(
        "Compile the layers (packed tokens on CUDA only).", null="", follows=f"{_ACTOR}.use_torch_compile"
    )
    optim: OptimConfig = key("Optimizer and schedule.")
    fsdp_config: FSDPConfig = key("The fsdp engine.")
    megatron_config: MegatronConfig = key("The megatron engine.", aliases=("megatron",))
    checkpoint: CheckpointConfig = key("What is saved and loaded.")
