"""`*.optim`, `*.fsdp_config`, `*.megatron_config`, `*.checkpoint`: the training engine under any role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config import names
from verl.config.schema import Block, key

_RANK_DOC = "Rank of the LoRA adapters (needs the extra `lora`); 0: train all weights."
_ALPHA_DOC = "Scale of the LoRA adapters: their product counts lora_alpha / lora_rank times."
_TARGETS_DOC = "Layers with an adapter: [all-linear] (not the output head), ends of names, or one regular expression."
_EXCLUDED_DOC = "Layers that get no adapter: ends of names, or one regular expression."


@dataclass(kw_only=True, slots=True)
class ModelConfig(Block):
    path: str = key(
        "Local folder, hub name or URL of the model; a global_step_N folder of ours works too.",
        required="Qwen/Qwen2.5-0.5B-Instruct",
        path=True,
    )
    trust_remote_code: bool = key("Run Python code that comes with the model.")
    use_remove_padding: bool = key("Run every pass on packed tokens without padding.")
    enable_gradient_checkpointing: bool = key(
        "Recompute activations in the backward pass: about half of their memory for a third more compute.",
        aliases=("../actor.fsdp_config.gradient_checkpointing",),
    )
    override_config: dict[str, Any] = key("Values that replace those of the model's own config.json.")
    lora_rank: int = key(_RANK_DOC, min=0)
    lora_alpha: float = key(_ALPHA_DOC, above=0)
    target_modules: list[str] = key(_TARGETS_DOC)
    exclude_modules: list[str] = key(_EXCLUDED_DOC, null="none")


@dataclass(kw_only=True, slots=True)
class CriticModelConfig(Block):
    path: str = key("Model that gets the value head.", null="", follows="actor_rollout_ref.model.path", path=True)
    trust_remote_code: bool = key(
        "Run Python code that comes with the model.", null="", follows="actor_rollout_ref.model.trust_remote_code"
    )
    use_remove_padding: bool = key(
        "Run every pass on packed tokens without padding.",
        null="",
        follows="actor_rollout_ref.model.use_remove_padding",
    )
    enable_gradient_checkpointing: bool = key(
        "Recompute activations in the backward pass.", aliases=("../fsdp_config.gradient_checkpointing",)
    )
    override_config: dict[str, Any] = key("Values that replace those of the model's own config.json.")
    lora_rank: int = key(_RANK_DOC + " The value head always learns.", min=0)
    lora_alpha: float = key(_ALPHA_DOC, above=0)
    target_modules: list[str] = key(_TARGETS_DOC)
    exclude_modules: list[str] = key(_EXCLUDED_DOC, null="none")


@dataclass(kw_only=True, slots=True)
class RewardModelModelConfig(Block):
    input_tokenizer: str | None = key(
        "Tokenizer that the texts arrive in, when the reward model has another one.",
        null="the actor's; where tokenizer or chat template differ, prompts are written anew from their messages",
        path=True,
    )
    trust_remote_code: bool = key(
        "Run Python code that comes with the model.", null="", follows="actor_rollout_ref.model.trust_remote_code"
    )
    use_remove_padding: bool = key(
        "Run every pass on packed tokens without padding.",
        null="",
        follows="actor_rollout_ref.model.use_remove_padding",
    )
    override_config: dict[str, Any] = key("Values that replace those of the model's own config.json.")


_PRECISIONS = {
    True: "bf16",
    False: "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "no": "fp32",
}
# What of Core's TransformerConfig says how many layers the outer stages of a pipeline have, and what is recomputed.
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(kw_only=True, slots=True)
class OptimConfig(Block):
    lr: float = key("Learning rate (AdamW).", min=0)
    weight_decay: float = key("Decoupled weight decay.", min=0)
    betas: list[float] = key("Decay of the first and second moment.")
    eps: float = key("Added to the root of AdamW's second moment: gradients far below it take small steps.", above=0)
    lr_warmup_steps: int = key(
        "Optimizer steps of linear warm-up; 0 or less: use lr_warmup_steps_ratio.", min=-1, aliases=("warmup_steps",)
    )
    lr_warmup_steps_ratio: float = key(
        "Warm-up as a share of total_training_steps.", min=0, max=1, aliases=("warmup_steps_ratio",)
    )
    lr_scheduler: str = key(
        "Shape after the warm-up.", choices=("constant", "cosine"), aliases=("lr_scheduler_type", "warmup_style")
    )
    min_lr_ratio: float = key("Where cosine ends, as a share of lr.", min=0, max=1)
    state_dtype: str = key(
        "Precision of AdamW's moments between steps; bf16 takes 4 bytes per parameter instead of 8, rounded at random.",
        choices=("fp32", "bf16"),
        synonyms={"float32": "fp32", "bfloat16": "bf16"},
    )
    total_training_steps: int | None = key(
        "Optimizer steps the schedule is laid out for.", null="those of the run", min=1, synonyms={-1: None}
    )


@dataclass(kw_only=True, slots=True)
class FSDPConfig(Block):
    param_offload: bool = key(
        "Between its own phases, parameters wait in (page-locked) host memory.", null="in ref: the actor's"
    )
    optimizer_offload: bool = key(
        "Between updates, optimizer states wait in (page-locked) host memory.", null="in ref: the actor's"
    )
    grad_offload: bool = key(
        "Gradients of earlier micro-batches wait in host memory while one runs (between phases there are none).",
        null="in ref: the actor's",
    )
    fsdp_size: int = key(
        "Ranks one copy of the weights is sharded over; -1: all of the pool.", null="in ref: the actor's", min=-1
    )
    mixed_precision: str = key(
        "Precision of compute; master weights and reductions stay fp32.",
        null="bf16 on CUDA, fp32 on CPU; in ref: the actor's",
        choices=("bf16", "fp16", "fp32"),
        synonyms=_PRECISIONS,
    )
    reshard_after_forward: bool | None = key(
        "Free each layer's gathered parameters (in the compute dtype) after its forward pass: less memory, "
        "more traffic.",
        null="true where weights are sharded over several ranks, else false; in ref: the actor's",
    )
    forward_prefetch: bool = key(
        "Start to gather each layer's parameters while the layer before it still computes.", null="in ref: the actor's"
    )


@dataclass(kw_only=True, slots=True)
class MegatronConfig(Block):
    tensor_model_parallel_size: int = key("Ranks each layer is split over.", null="in ref: the actor's", min=1)
    pipeline_model_parallel_size: int = key("Stages the layers are split into.", null="in ref: the actor's", min=1)
    virtual_pipeline_model_parallel_size: int | None = key(
        "Parts of the layers on each stage, interleaved with other stages': a shorter pipeline bubble.",
        null="one; in ref: the actor's",
        min=1,
    )
    context_parallel_size: int = key("Ranks each sequence is split over.", null="in ref: the actor's", min=1)
    expert_model_parallel_size: int = key("Ranks the experts are spread over.", null="in ref: the actor's", min=1)
    expert_tensor_parallel_size: int | None = key(
        "Ranks each expert is split over.", null="tensor_model_parallel_size; in ref: the actor's", min=1
    )
    sequence_parallel: bool = key(
        "Between split layers each tensor rank keeps its part of the tokens; nothing with one tensor rank.",
        null="in ref: the actor's",
    )
    use_distributed_optimizer: bool = key(
        "Shard optimizer states over the ranks that hold the same weights.", null="in ref: the actor's"
    )
    dtype: str = key(
        "Precision of compute; master weights and reductions stay fp32.",
        null="bf16 on CUDA, fp32 on CPU; in ref: the actor's",
        choices=("bf16", "fp16", "fp32"),
        synonyms=_PRECISIONS,
        aliases=("mixed_precision",),
    )
    param_offload: bool = key(
        "Between its own phases, parameters wait in (page-locked) host memory.", null="in ref: the actor's"
    )
    grad_offload: bool = key(
        "Between updates, the gradients' buffers hold no device memory.", null="in ref: the actor's"
    )
    optimizer_offload: bool = key(
        "Between updates, optimizer states wait in (page-locked) host memory.", null="in ref: the actor's"
    )
    use_dist_checkpointing: bool = key(
        "Begin with the weights at dist_checkpointing_path instead of model.path's (what is saved is always sharded).",
        null="in ref: the actor's",
    )
    dist_checkpointing_path: str | None = key(
        "A role's folder in a checkpoint, e.g. `…/global_step_100/actor`.",
        null="none; in ref: the actor's",
        path=True,
    )
    use_mbridge: bool = key(
        "Weights from and to Hugging Face's names by Megatron-Bridge, where it is installed; else by our own tables.",
        null="in ref: the actor's",
    )
    override_transformer_config: dict[str, Any] = key(
        "Values for Core's TransformerConfig, e.g. recompute_granularity (else enable_gradient_checkpointing decides).",
        null="in ref: the actor's",
    )
    override_ddp_config: dict[str, Any] = key(
        "Values for Core's DistributedDataParallelConfig, e.g. pad_buckets_for_high_nccl_busbw.",
        null="in ref: the actor's",
    )

    def outer_stages(self) -> tuple[int | None, int | None]:
        """Layers of the first and of the last stage of the pipeline; None: as many as the others."""
        first, last = (self.override_transformer_config.get(name) for name in UNEVEN)
        return first, last

    def recompute(self, checkpointing: bool) -> dict[str, Any]:
        """What of a forward pass is computed again for the backward pass, in the words of Core's TransformerConfig.

        `checkpointing`: model.enable_gradient_checkpointing, which stands for every layer where nothing else is set.
        """
        set_here = {name: value for name, value in self.override_transformer_config.items() if name in RECOMPUTE}
        usual = "full" if checkpointing else None
        granularity = set_here.get("recompute_granularity", usual)
        if granularity is None:
            return {}
        layers = {"recompute_method": "uniform", "recompute_num_layers": 1} if granularity == "full" else {}
        return layers | set_here | {"recompute_granularity": granularity}


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Block):
    save_contents: list[str] = key(
        "What a checkpoint holds; hf_model is for transformers (LoRA merged); with LoRA, model is adapters alone.",
        choices=names.CHECKPOINT_CONTENTS,
    )
    load_contents: list[str] = key("What is read back on resume.", choices=names.CHECKPOINT_CONTENTS)
    snapshot: bool | None = key(
        "Copy what is saved to host memory and write it while training goes on; false: training waits for the files.",
        null="where the plan of host memory has room for the copy",
    )
