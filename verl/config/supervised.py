"""`SupervisedConfig`: keys and rules shared by `main_sft` and `main_rm`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from verl.config import files
from verl.config.block_rules import (
    check_lora_package,
    lora_rules,
    optimizer_rules,
    packed_token_rules,
    run_rules,
    sharing_exclusion,
    user_code_rules,
    values_present,
)
from verl.config.context_length import LONGER_CONTEXT, context_limit_of_folder
from verl.config.engine import PREFIX_CHOICES, PREFIX_SYNONYMS, CheckpointConfig, FSDPConfig, ModelConfig, OptimConfig
from verl.config.plan import FSDP_IS_FSDP2
from verl.config.ppo import CustomClassConfig
from verl.config.problems import Report, count
from verl.config.resolve import DEFAULT_MICRO_BATCH, empty_lists, resolve_run
from verl.config.schema import Block, RootConfig, key
from verl.config.trainer import RayInitConfig, RunConfig


@dataclass(kw_only=True, slots=True)
class SupervisedDataConfig(Block):
    train_files: list[str] = key(
        "Training rows: one path, a list, a folder or a hub name.", required="$HOME/data/gsm8k/train.parquet", path=True
    )
    val_files: list[str] = key(
        "Validation rows, in the forms of train_files; empty: no validation.", null="none", path=True
    )
    train_batch_size: int = key("Rows per training step, over all ranks.", min=1)
    micro_batch_size_per_gpu: int = key("Rows per forward pass on a rank.", null="4, at most a rank's rows", min=1)
    use_dynamic_bsz: bool = key("Fill micro-batches up to max_token_len_per_gpu instead of a fixed number of rows.")
    max_token_len_per_gpu: int = key("Tokens per forward pass on a rank, with use_dynamic_bsz.", min=1)
    val_batch_size: int = key("Rows per validation batch.", follows="data.train_batch_size", min=1)
    max_length: int = key("Largest row length (prompt and response) in tokens.", min=2)
    truncation: str = key("Longer rows: error, or cut at this side.", choices=("error", "left", "right", "middle"))
    shuffle: bool = key("Shuffle the training rows every epoch.")
    seed: int = key("Seed of the run: order of rows.", min=0)
    dataloader_num_workers: int = key("Data loader processes; 0: load in the controller.", min=0)
    train_max_samples: int = key("Use only the first rows of the training set; -1: all.", min=-1)
    val_max_samples: int = key("Use only the first rows of the validation set; -1: all.", min=-1)
    apply_chat_template_kwargs: dict[str, Any] = key("Arguments for the tokenizer's chat template.")
    custom_cls: CustomClassConfig = key("Custom dataset class.")


@dataclass(kw_only=True, slots=True)
class SupervisedModelConfig(ModelConfig):
    path: str = key(
        "Local folder, hub name or URL of the model; a checkpoint folder global_step_N works too.",
        required="Qwen/Qwen2.5-0.5B-Instruct",
        path=True,
        aliases=("partial_pretrain",),
    )
    use_remove_padding: bool = key("Pack sequences without padding in all passes.", aliases=("../use_remove_padding",))
    enable_gradient_checkpointing: bool = key(
        "Gradient checkpointing: recompute activations in the backward pass (less memory, up to a third more compute).",
        aliases=("../fsdp_config.gradient_checkpointing",),
    )


@dataclass(kw_only=True, slots=True)
class SupervisedOptimConfig(OptimConfig):
    grad_clip: float = key("Gradients are clipped to this norm.", above=0, aliases=("clip_grad", "max_grad_norm"))


@dataclass(kw_only=True, slots=True)
class SupervisedTrainerConfig(RunConfig):
    save_freq: int | None = key("Steps between checkpoints; 0 or less: only the last.", null="once per epoch")
    test_freq: int | None = key("Steps between validations; 0 or less: only the last.", null="once per epoch")
    max_ckpt_to_keep: int | None = key(
        "Checkpoints to keep; older ones are deleted.", null="keep all", min=1, aliases=("max_actor_ckpt_to_keep",)
    )


@dataclass(kw_only=True, slots=True)
class SupervisedConfig(RootConfig):
    data: SupervisedDataConfig = key("Rows and batches.")
    model: SupervisedModelConfig = key("Trained model.")
    optim: SupervisedOptimConfig = key("Optimizer and schedule.")
    strategy: str = key(
        "Training engine; both are torch's fully_shard.",
        choices=("fsdp", "fsdp2"),
        aliases=("engine", "model.strategy"),
    )
    use_torch_compile: bool = key("Compile the layers (packed tokens on CUDA only).")
    use_prefix_grouper: str = key(
        "Compute common prefixes of rows once (packed tokens); auto: if that saves 10 % of the tokens.",
        choices=PREFIX_CHOICES,
        synonyms=PREFIX_SYNONYMS,
    )
    ulysses_sequence_parallel_size: int = key(
        "Ranks each row is split over (Ulysses).", min=1, aliases=("fsdp_config.ulysses_sequence_parallel_size",)
    )
    fsdp_config: FSDPConfig = key("FSDP engine.", aliases=("model.fsdp_config",))
    checkpoint: CheckpointConfig = key("Contents of checkpoints.")
    trainer: SupervisedTrainerConfig = key("Run: devices, steps, checkpoints, trackers.")
    ray_init: RayInitConfig = key("How Ray is started (with several ranks).")

    @property
    def model_kind(self) -> Literal["causal_lm", "sequence_classification"]:
        """Model class for loading and saving."""
        return "causal_lm"

    @property
    def rows_per_step(self) -> int:
        """Rows of a training step over all ranks; a lower bound if prompts have a varying number of rows."""
        return self.data.train_batch_size

    @property
    def max_rows_per_rank(self) -> int | None:
        """Rows of a training step on one rank; None if it depends on the data."""
        return math.ceil(self.rows_per_step / self.dp_size)

    @property
    def ranks(self) -> int:
        """Training processes, one per device."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def split(self) -> dict[str, int]:
        """Parallel sizes of the ranks that share each row, by name."""
        return {"Ulysses": self.ulysses_sequence_parallel_size}

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that share the tokens of each row."""
        return self.ulysses_sequence_parallel_size

    @property
    def dp_size(self) -> int:
        """Data-parallel size."""
        return max(1, self.ranks // math.prod(self.split.values()))


_RANKS = ("trainer.n_gpus_per_node", "trainer.nnodes")
_LORA = ("model.lora_alpha", "model.target_modules", "model.exclude_modules")


def resolve(config: SupervisedConfig, report: Report) -> None:
    """Replace every null that stands for another value."""
    data = config.data
    resolve_run(config.trainer)
    empty_lists(config)
    if config.fsdp_config.mixed_precision is None:
        config.fsdp_config.mixed_precision = "bf16" if config.trainer.device == "cuda" else "fp32"
    exclusion = sharing_exclusion(config, config, config.model.use_remove_padding)
    if config.use_prefix_grouper == "auto" and exclusion is not None:
        config.use_prefix_grouper = "false"
        report.notice(f"use_prefix_grouper = auto: prefixes are not shared, because {exclusion}.")
    if data.micro_batch_size_per_gpu is None:
        data.micro_batch_size_per_gpu = min(DEFAULT_MICRO_BATCH, config.max_rows_per_rank or DEFAULT_MICRO_BATCH)
    if data.val_batch_size is None:
        data.val_batch_size = data.train_batch_size


def validate(config: SupervisedConfig, report: Report) -> None:
    """Report all problems of a resolved configuration."""
    values_present(config, "", report)
    _batches(config, report)
    optimizer_rules("optim", config.optim, report)
    lora_rules("model", config.model, config.optim.lr, report)
    run_rules(config.trainer, report)
    user_code_rules("data.custom_cls", config.data.custom_cls, report)
    size, ranks = config.fsdp_config.fsdp_size, config.ranks
    if size == 0 or (size > 0 and ranks % size):
        why = f"does not divide the {count(ranks, 'rank')}"
        report.problem("fsdp_config.fsdp_size", size, why, "Set it to -1 (all ranks), or a divisor", _RANKS)
    ulysses_size = config.ulysses_sequence_parallel_size
    if ranks % ulysses_size:
        why, fix = f"does not divide the {count(ranks, 'rank')}", "Set it to 1, or a divisor"
        report.problem("ulysses_sequence_parallel_size", ulysses_size, why, fix, _RANKS)
    packed_token_rules("", config, "model", config, report)
    for name in ("param_offload", "optimizer_offload"):
        if config.fsdp_config[name]:
            report.notice(f"fsdp_config.{name} has no effect: no other role uses the device between training steps.")
    if not config.data.val_files:
        report.notice("data.val_files is not set: no validation.")
    dynamic = config.data.use_dynamic_bsz
    unused = "data.micro_batch_size_per_gpu" if dynamic else "data.max_token_len_per_gpu"
    report_unused(config, (unused,), f"with data.use_dynamic_bsz = {dynamic}", report)
    if not config.model.lora_rank:
        report_unused(config, _LORA, "without model.lora_rank", report)


def report_unused(config: SupervisedConfig, prefixes: tuple[str, ...], why: str, report: Report) -> None:
    """Add a notice about changed keys with these prefixes, which have no effect."""
    unused = sorted(name for name in config.changed if name.startswith(prefixes))
    if unused:
        report.notice(f"{', '.join(unused)}: no effect {why}.")


def _batches(config: SupervisedConfig, report: Report) -> None:
    data, ranks = config.data, config.dp_size
    rows, micro, share = data.train_batch_size, data.micro_batch_size_per_gpu, config.max_rows_per_rank
    if rows % ranks:
        below, above = rows // ranks * ranks, (rows // ranks + 1) * ranks
        why = f"is not divisible by the {count(ranks, 'data-parallel rank')}"
        fix = f"Set it to {above}" if below == 0 else f"Set it to {below} or {above}"
        report.problem("data.train_batch_size", rows, why, fix, _RANKS)
    elif share is not None and not data.use_dynamic_bsz and micro > share:
        why = f"is more than the {count(share, 'row')} of a training step on each rank"
        fix = f"Set it to {share} or less, or raise data.train_batch_size"
        report.problem("data.micro_batch_size_per_gpu", micro, why, fix, ("data.train_batch_size", *_RANKS))
    needed = math.ceil(data.max_length / config.ranks_per_sequence)
    if data.use_dynamic_bsz and data.max_token_len_per_gpu < needed:
        why = f"a row of data.max_length = {data.max_length} tokens does not fit"
        fix = f"Set it to {needed} or more"
        report.problem("data.max_token_len_per_gpu", data.max_token_len_per_gpu, why, fix, ("data.max_length",))


def check_environment(config: SupervisedConfig, report: Report) -> None:
    """Report missing files and packages."""
    files.check_data_files(config.data, report)
    if config.model.path:
        files.check_model("model.path", config.model.path, report)
        context_rules(config, report)
    files.check_user_code("data.custom_cls.path", config.data.custom_cls.path, report)
    files.check_resume(config.trainer, report)
    files.check_loggers(config.trainer.logger, report)
    check_lora_package("model", config.model, report)


def describe(config: SupervisedConfig) -> str:
    """Describe the batches of a training step and the strategy, for the log."""
    data, ranks = config.data, config.ranks
    share = config.max_rows_per_rank
    parallel_sizes = "".join(f" × {name} {size}" for name, size in config.split.items() if size > 1)
    split = f" = data-parallel {config.dp_size}{parallel_sizes}" if parallel_sizes else ""
    if data.use_dynamic_bsz:
        micro = f"micro-batches of up to {data.max_token_len_per_gpu} tokens"
    elif share is None:
        micro = f"micro-batches of up to {count(data.micro_batch_size_per_gpu, 'row')}"
    else:
        size = data.micro_batch_size_per_gpu
        micro = f"{count(math.ceil(share / size), 'micro-batch')} of {count(size, 'row')}"
    or_more, per_rank = (" or more", "") if share is None else ("", f"{share} each ")
    engine = f"\n{FSDP_IS_FSDP2}" if config.strategy == "fsdp" else ""
    return (
        f"Batch plan: {count(config.rows_per_step, 'row')}{or_more} of up to {data.max_length} tokens per step over "
        f"{count(ranks, 'rank')}{split} ({config.trainer.device}), {per_rank}in {micro}{engine}"
    )


def context_rules(config: SupervisedConfig, report: Report, folder: str | None = None) -> None:
    """Report rows (up to `data.max_length`) that exceed the context of the model; `folder` is its local folder."""
    path = config.model.path
    limit = None if not path else context_limit_of_folder(folder or path, config.model.override_config)
    if limit is not None and config.data.max_length > limit:
        why = f"is more than the {limit} positions of model.path = {path}"
        fix = f"Set it to {limit} or less, or {LONGER_CONTEXT}"
        report.problem("data.max_length", config.data.max_length, why, fix, ("model.path",))


def check_context_length(config: SupervisedConfig, folder: str) -> None:
    """Raise ConfigError if sequences may be longer than the model in the local `folder` supports."""
    report = Report()
    context_rules(config, report, folder)
    report.raise_if_any()
