"""`critic.*`: the value model (only where the estimator needs one)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.engine import CheckpointConfig, FSDPConfig, MegatronConfig, OptimConfig
from verl.config.model import CriticModelConfig
from verl.config.schema import Block, key

_ACTOR = "actor_rollout_ref.actor"


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
