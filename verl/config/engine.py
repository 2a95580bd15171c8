"""`*.model`, `*.optim`, `*.fsdp_config`, `*.megatron_config`, `*.checkpoint`: blocks shared by all roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config import names
from verl.config.schema import Block, key

_RANK_DOC = "Rank of the LoRA adapters (needs the extra `lora`); 0: train all weights."
_ALPHA_DOC = "LoRA scale: adapters are multiplied by lora_alpha / lora_rank."
_TARGETS_DOC = (
    "Layers with adapters: [all-linear] (without the output head), suffixes of names, or one regular expression."
)
_EXCLUDED_DOC = "Layers without adapters: suffixes of names, or one regular expression."


@dataclass(kw_only=True, slots=True)
class ModelConfig(Block):
    path: str = key(
        "Local folder, hub name or URL of the model; a checkpoint folder global_step_N works too.",
        required="Qwen/Qwen2.5-0.5B-Instruct",
        path=True,
    )
    trust_remote_code: bool = key("Run Python code from the model repository.")
    use_remove_padding: bool = key("Pack sequences without padding in all passes.")
    enable_gradient_checkpointing: bool = key(
        "Gradient checkpointing: recompute activations in the backward pass (less memory, up to a third more compute).",
        aliases=("../actor.fsdp_config.gradient_checkpointing",),
    )
    override_config: dict[str, Any] = key("Values that override the model's config.json.")
    lora_rank: int = key(_RANK_DOC, min=0)
    lora_alpha: float = key(_ALPHA_DOC, above=0)
    target_modules: list[str] = key(_TARGETS_DOC)
    exclude_modules: list[str] = key(_EXCLUDED_DOC, null="none")


@dataclass(kw_only=True, slots=True)
class CriticModelConfig(Block):
    path: str = key("Model below the value head.", follows="actor_rollout_ref.model.path", path=True)
    trust_remote_code: bool = key(
        "Run Python code from the model repository.", follows="actor_rollout_ref.model.trust_remote_code"
    )
    use_remove_padding: bool = key(
        "Pack sequences without padding in all passes.", follows="actor_rollout_ref.model.use_remove_padding"
    )
    enable_gradient_checkpointing: bool = key(
        "Gradient checkpointing: recompute activations in the backward pass.",
        aliases=("../fsdp_config.gradient_checkpointing",),
    )
    override_config: dict[str, Any] = key("Values that override the model's config.json.")
    lora_rank: int = key(_RANK_DOC + " The value head is always trained.", min=0)
    lora_alpha: float = key(_ALPHA_DOC, above=0)
    target_modules: list[str] = key(_TARGETS_DOC)
    exclude_modules: list[str] = key(_EXCLUDED_DOC, null="none")


@dataclass(kw_only=True, slots=True)
class RewardModelModelConfig(Block):
    input_tokenizer: str | None = key(
        "Tokenizer of the policy, if the reward model uses another one.",
        null="the actor's; if tokenizer or chat template differ, prompts are rendered again from their messages",
        path=True,
    )
    trust_remote_code: bool = key(
        "Run Python code from the model repository.", follows="actor_rollout_ref.model.trust_remote_code"
    )
    use_remove_padding: bool = key(
        "Pack sequences without padding in all passes.", follows="actor_rollout_ref.model.use_remove_padding"
    )
    override_config: dict[str, Any] = key("Values that override the model's config.json.")


_PRECISIONS = {True: "bf16", False: "fp32", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "no": "fp32"}
# With `use_prefix_grouper=auto`, prefixes are shared if that saves at least this fraction of the tokens.
PREFIX_MIN_SAVING = 0.1
PREFIX_CHOICES = ("auto", "true", "false")
PREFIX_SYNONYMS = {True: "true", False: "false", "True": "true", "False": "false"}
_AS_ACTOR = "in ref: the actor's value"
# Fields of Megatron Core's TransformerConfig: layers of the outer pipeline stages, activation recomputation.
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(kw_only=True, slots=True)
class OptimConfig(Block):
    lr: float = key("Learning rate (AdamW).", min=0)
    weight_decay: float = key("Decoupled weight decay.", min=0)
    betas: list[float] = key("Betas of AdamW.")
    eps: float = key("Epsilon of AdamW.", above=0)
    lr_warmup_steps: int = key(
        "Optimizer steps of linear warm-up; 0 or less: use lr_warmup_steps_ratio.", min=-1, aliases=("warmup_steps",)
    )
    lr_warmup_steps_ratio: float = key(
        "Warm-up as a fraction of total_training_steps.", min=0, max=1, aliases=("warmup_steps_ratio",)
    )
    lr_scheduler: str = key(
        "Learning rate schedule after the warm-up.",
        choices=("constant", "cosine"),
        aliases=("lr_scheduler_type", "warmup_style"),
    )
    min_lr_ratio: float = key("Final learning rate of cosine, as a fraction of lr.", min=0, max=1)
    state_dtype: str = key(
        "Precision of AdamW's moments; bf16 (stochastic rounding) takes 4 instead of 8 bytes per parameter.",
        choices=("fp32", "bf16"),
        synonyms={"float32": "fp32", "bfloat16": "bf16"},
    )
    total_training_steps: int | None = key(
        "Optimizer steps of the learning rate schedule.",
        null="the optimizer steps of the run",
        min=1,
        synonyms={-1: None},
    )


@dataclass(kw_only=True, slots=True)
class FSDPConfig(Block):
    param_offload: bool = key("Keep parameters in pinned host memory while the role is idle.", null=_AS_ACTOR)
    optimizer_offload: bool = key("Keep optimizer states in pinned host memory between updates.", null=_AS_ACTOR)
    grad_offload: bool = key(
        "Accumulate gradients in host memory during a step (between steps there are none).", null=_AS_ACTOR
    )
    fsdp_size: int = key("Ranks per sharded copy of the weights; -1: all of the pool.", null=_AS_ACTOR, min=-1)
    mixed_precision: str = key(
        "Precision of compute; master weights and reductions stay fp32.",
        null="bf16 on CUDA, fp32 on CPU; in ref: the actor's value",
        choices=("bf16", "fp16", "fp32"),
        synonyms=_PRECISIONS,
    )
    reshard_after_forward: bool | None = key(
        "Free each layer's gathered parameters after its forward pass: less memory, more communication.",
        null="true if weights are sharded over several ranks, else false; in ref: the actor's value",
    )
    forward_prefetch: bool = key("Gather each layer's parameters while the previous layer computes.", null=_AS_ACTOR)


@dataclass(kw_only=True, slots=True)
class MegatronConfig(Block):
    tensor_model_parallel_size: int = key("Tensor parallel size: ranks per layer.", null=_AS_ACTOR, min=1)
    pipeline_model_parallel_size: int = key("Pipeline parallel size: stages of layers.", null=_AS_ACTOR, min=1)
    virtual_pipeline_model_parallel_size: int | None = key(
        "Interleaved model chunks per pipeline stage, for a shorter pipeline bubble.",
        null="one; in ref: the actor's value",
        min=1,
    )
    context_parallel_size: int = key("Context parallel size: ranks per sequence.", null=_AS_ACTOR, min=1)
    expert_model_parallel_size: int = key("Expert parallel size.", null=_AS_ACTOR, min=1)
    expert_tensor_parallel_size: int | None = key(
        "Tensor parallel size of each expert.", null="tensor_model_parallel_size; in ref: the actor's value", min=1
    )
    sequence_parallel: bool = key(
        "Megatron sequence parallelism: tensor ranks share the activations between layers; no effect with one rank.",
        null=_AS_ACTOR,
    )
    use_distributed_optimizer: bool = key("Shard optimizer states over data-parallel ranks.", null=_AS_ACTOR)
    dtype: str = key(
        "Precision of compute; master weights and reductions stay fp32.",
        null="bf16 on CUDA, fp32 on CPU; in ref: the actor's value",
        choices=("bf16", "fp16", "fp32"),
        synonyms=_PRECISIONS,
        aliases=("mixed_precision",),
    )
    param_offload: bool = key("Keep parameters in pinned host memory while the role is idle.", null=_AS_ACTOR)
    grad_offload: bool = key("Free the gradient buffers between updates.", null=_AS_ACTOR)
    optimizer_offload: bool = key("Keep optimizer states in pinned host memory between updates.", null=_AS_ACTOR)
    use_dist_checkpointing: bool = key(
        "Load initial weights from dist_checkpointing_path instead of model.path (checkpoints are always sharded).",
        null=_AS_ACTOR,
    )
    dist_checkpointing_path: str | None = key(
        "Folder of a role in a checkpoint, e.g. `…/global_step_100/actor`.",
        null="none; in ref: the actor's value",
        path=True,
    )
    use_mbridge: bool = key(
        "Convert Hugging Face weights with Megatron-Bridge if installed; else with the built-in mapping.",
        null=_AS_ACTOR,
    )
    override_transformer_config: dict[str, Any] = key(
        "Fields of Core's TransformerConfig, e.g. recompute_granularity (overrides enable_gradient_checkpointing).",
        null=_AS_ACTOR,
    )
    override_ddp_config: dict[str, Any] = key(
        "Fields of Core's DistributedDataParallelConfig, e.g. pad_buckets_for_high_nccl_busbw.", null=_AS_ACTOR
    )

    def outer_stages(self) -> tuple[int | None, int | None]:
        """Return the layers of the first and the last pipeline stage; None: as many as the other stages."""
        first, last = (self.override_transformer_config.get(name) for name in UNEVEN)
        return first, last

    def recompute(self, checkpointing: bool) -> dict[str, Any]:
        """Return the recomputation fields of Core's TransformerConfig.

        `checkpointing` (model.enable_gradient_checkpointing) recomputes every layer unless overridden.
        """
        overrides = {name: value for name, value in self.override_transformer_config.items() if name in RECOMPUTE}
        default = "full" if checkpointing else None
        granularity = overrides.get("recompute_granularity", default)
        if granularity is None:
            return {}
        layers = {"recompute_method": "uniform", "recompute_num_layers": 1} if granularity == "full" else {}
        return layers | overrides | {"recompute_granularity": granularity}


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Block):
    save_contents: list[str] = key(
        "Parts to save; hf_model is in Hugging Face format (LoRA merged); with LoRA, model contains adapters only.",
        choices=names.CHECKPOINT_CONTENTS,
    )
    load_contents: list[str] = key("Parts to load on resume.", choices=names.CHECKPOINT_CONTENTS)
    snapshot: bool | None = key(
        "Copy the state to host memory and write it in the background; false: training waits for the files.",
        null="if the memory plan leaves room for the copy in host memory",
    )
