"""`actor_rollout_ref.ref.*`: the reference policy; what is not set here is as for the actor."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.engine import FSDPConfig, MegatronConfig
from verl.config.schema import Block, key

_ACTOR = "actor_rollout_ref.actor"


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
