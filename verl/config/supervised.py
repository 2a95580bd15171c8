"""What the configurations of supervised runs share: `main_sft` (answers), `main_rm` (preferences)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from verl.config.data import CustomClassConfig
from verl.config.engine import CheckpointConfig, FSDPConfig, OptimConfig
from verl.config.model import ModelConfig
from verl.config.schema import Block, WholeConfig, key
from verl.config.trainer import RayInitConfig, RunConfig


@dataclass(kw_only=True, slots=True)
class SupervisedDataConfig(Block):
    train_files: list[str] = key(
        "Training rows: one path, a list, a folder or a hub name.",
        required="$HOME/data/gsm8k/train.parquet",
        path=True,
    )
    val_files: list[str] = key("Validation rows, likewise; empty: no validation.", null="none", path=True)
    train_batch_size: int = key("Rows per training step, over all ranks.", min=1)
    micro_batch_size_per_gpu: int = key("Rows per forward pass on a rank.", null="4, or what a rank has", min=1)
    use_dynamic_bsz: bool = key("Fill every forward pass up to max_token_len_per_gpu instead.")
    max_token_len_per_gpu: int = key("Tokens per forward pass on a rank, with use_dynamic_bsz.", min=1)
    val_batch_size: int = key("Rows per validation batch.", null="", follows="data.train_batch_size", min=1)
    max_length: int = key("Longest row (prompt and answer) in tokens.", min=2)
    truncation: str = key("What to do with a longer row.", choices=("error", "left", "right", "middle"))
    shuffle: bool = key("Shuffle the training rows every epoch.")
    seed: int = key("Seed of the run: the order of rows.", min=0)
    dataloader_num_workers: int = key("Processes that load data; 0: the controller itself.", min=0)
    train_max_samples: int = key("Use only the first rows of the training set; -1: all.", min=-1)
    val_max_samples: int = key("Use only the first rows of the validation set; -1: all.", min=-1)
    apply_chat_template_kwargs: dict[str, Any] = key("Arguments for the tokenizer's chat template.")
    custom_cls: CustomClassConfig = key("A dataset class of your own.")


@dataclass(kw_only=True, slots=True)
class SupervisedModelConfig(ModelConfig):
    path: str = key(
        "Local folder, hub name or URL of the model; a global_step_N folder of ours works too.",
        required="Qwen/Qwen2.5-0.5B-Instruct",
        path=True,
        aliases=("partial_pretrain",),
    )
    use_remove_padding: bool = key(
        "Run every pass on packed tokens without padding.", aliases=("../use_remove_padding",)
    )
    enable_gradient_checkpointing: bool = key(
        "Recompute activations in the backward pass: about half of their memory for a third more compute.",
        aliases=("../fsdp_config.gradient_checkpointing",),
    )


@dataclass(kw_only=True, slots=True)
class SupervisedOptimConfig(OptimConfig):
    grad_clip: float = key("Gradients are scaled down to this norm.", above=0, aliases=("clip_grad", "max_grad_norm"))


@dataclass(kw_only=True, slots=True)
class SupervisedTrainerConfig(RunConfig):
    save_freq: int | None = key("Steps between checkpoints; 0 or less: only the last.", null="once per epoch")
    test_freq: int | None = key("Steps between validations; 0 or less: only the last.", null="once per epoch")
    max_ckpt_to_keep: int | None = key(
        "Older checkpoints are deleted.", null="keep all", min=1, aliases=("max_actor_ckpt_to_keep",)
    )


@dataclass(kw_only=True, slots=True)
class SupervisedConfig(WholeConfig):
    data: SupervisedDataConfig = key("Rows and batches.")
    model: SupervisedModelConfig = key("The model that is trained.")
    optim: SupervisedOptimConfig = key("The optimizer.")
    strategy: str = key(
        "Training engine; both are torch's fully_shard.",
        choices=("fsdp", "fsdp2"),
        aliases=("engine", "model.strategy"),
    )
    use_torch_compile: bool = key("Compile the layers (packed tokens on CUDA only).")
    ulysses_sequence_parallel_size: int = key(
        "Ranks each row is split over (Ulysses).", min=1, aliases=("fsdp_config.ulysses_sequence_parallel_size",)
    )
    fsdp_config: FSDPConfig = key("How the model is sharded.", aliases=("model.fsdp_config",))
    checkpoint: CheckpointConfig = key("What a checkpoint holds.")
    trainer: SupervisedTrainerConfig = key("The run.")
    ray_init: RayInitConfig = key("Starting Ray, which several ranks need.")

    @property
    def model_kind(self) -> Literal["causal_lm", "sequence_classification"]:
        """What the model is loaded as, and saved as."""
        return "causal_lm"

    @property
    def rows_per_step(self) -> int:
        """Rows of a training step over all ranks; where prompts have several, those of prompts with the fewest."""
        return self.data.train_batch_size

    @property
    def most_rows_per_rank(self) -> int | None:
        """Rows of a training step on one rank; None where only the files can say."""
        return math.ceil(self.rows_per_step / self.dp_size)

    @property
    def ranks(self) -> int:
        """Processes that train, one per device."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def split(self) -> dict[str, int]:
        """How many ranks share every row, by what for."""
        return {"Ulysses": self.ulysses_sequence_parallel_size}

    @property
    def sharing(self) -> int:
        """Ranks over which the tokens of a row are spread."""
        return self.ulysses_sequence_parallel_size

    @property
    def dp_size(self) -> int:
        """Parts that a batch is cut into: groups of ranks that share every row."""
        return max(1, self.ranks // math.prod(self.split.values()))
