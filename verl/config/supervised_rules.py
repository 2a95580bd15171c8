"""The rules of a `SupervisedConfig`: what its nulls stand for, what does not fit together, what must exist here."""

from __future__ import annotations

import math

from verl.config import files
from verl.config.context_length import supervised_context_rules
from verl.config.lora_rules import lora_rules
from verl.config.plan import FSDP_IS_FSDP2
from verl.config.problems import Report
from verl.config.resolve import DEFAULT_MICRO_BATCH, empty_lists, resolve_run
from verl.config.supervised import SupervisedConfig
from verl.config.validate import (
    optimizer_rules,
    run_rules,
    sequence_parallel_rules,
    user_code_rules,
    values_present,
)
from verl.config.wording import count

_RANKS = ("trainer.n_gpus_per_node", "trainer.nnodes")
_LORA = ("model.lora_alpha", "model.target_modules", "model.exclude_modules")


def resolve(config: SupervisedConfig, report: Report) -> None:
    """Fill in every null that stands for something."""
    data = config.data
    resolve_run(config.trainer)
    empty_lists(config)
    if config.fsdp_config.mixed_precision is None:
        config.fsdp_config.mixed_precision = "bf16" if config.trainer.device == "cuda" else "fp32"
    if data.micro_batch_size_per_gpu is None:
        data.micro_batch_size_per_gpu = min(DEFAULT_MICRO_BATCH, config.most_rows_per_rank or DEFAULT_MICRO_BATCH)
    if data.val_batch_size is None:
        data.val_batch_size = data.train_batch_size


def validate(config: SupervisedConfig, report: Report) -> None:
    """Report every rule that a resolved configuration breaks."""
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
    sharing = config.ulysses_sequence_parallel_size
    if ranks % sharing:
        why, fix = f"does not divide the {count(ranks, 'rank')}", "Set it to 1, or a divisor"
        report.problem("ulysses_sequence_parallel_size", sharing, why, fix, _RANKS)
    sequence_parallel_rules("ulysses_sequence_parallel_size", sharing, "model", config, report)
    for name in ("param_offload", "optimizer_offload"):
        if config.fsdp_config[name]:
            report.notice(f"fsdp_config.{name} has no effect: nothing else needs the device between training steps.")
    if not config.data.val_files:
        report.notice("data.val_files is not set: no validation.")
    dynamic = config.data.use_dynamic_bsz
    unused = "data.micro_batch_size_per_gpu" if dynamic else "data.max_token_len_per_gpu"
    tell_idle(config, (unused,), f"with data.use_dynamic_bsz = {dynamic}", report)
    if not config.model.lora_rank:
        tell_idle(config, _LORA, "without model.lora_rank", report)


def tell_idle(config: SupervisedConfig, beginnings: tuple[str, ...], why: str, report: Report) -> None:
    """Say which of the keys that begin so were set in vain."""
    idle = sorted(name for name in config.changed if name.startswith(beginnings))
    if idle:
        report.notice(f"{', '.join(idle)}: no effect {why}.")


def _batches(config: SupervisedConfig, report: Report) -> None:
    data, ranks = config.data, config.dp_size
    rows, micro, share = data.train_batch_size, data.micro_batch_size_per_gpu, config.most_rows_per_rank
    if rows % ranks:
        below, above = rows // ranks * ranks, (rows // ranks + 1) * ranks
        why = f"does not divide over the {count(ranks, 'data-parallel rank')}"
        fix = f"Set it to {above}" if below == 0 else f"Set it to {below} or {above}"
        report.problem("data.train_batch_size", rows, why, fix, _RANKS)
    elif share is not None and not data.use_dynamic_bsz and micro > share:
        why = f"is more than the {count(share, 'row')} of a training step on each rank"
        fix = f"Set it to {share} or less, or raise data.train_batch_size"
        report.problem("data.micro_batch_size_per_gpu", micro, why, fix, ("data.train_batch_size", *_RANKS))
    needed = math.ceil(data.max_length / config.sharing)
    if data.use_dynamic_bsz and data.max_token_len_per_gpu < needed:
        why = f"a row of data.max_length = {data.max_length} tokens does not fit"
        fix = f"Set it to {needed} or more"
        report.problem("data.max_token_len_per_gpu", data.max_token_len_per_gpu, why, fix, ("data.max_length",))


def check_environment(config: SupervisedConfig, report: Report) -> None:
    """Report every path that does not exist here and every package that is asked for and missing."""
    files.check_data_files(config.data, report)
    if config.model.path:
        files.check_model("model.path", config.model.path, report)
        supervised_context_rules(config, report)
    files.check_user_code("data.custom_cls.path", config.data.custom_cls.path, report)
    files.check_resume(config.trainer, report)
    files.check_loggers(config.trainer.logger, report)


def describe(config: SupervisedConfig) -> str:
    """The batches of a training step in one readable line, and what the strategy is; for the log."""
    data, ranks = config.data, config.ranks
    share = config.most_rows_per_rank
    shared = "".join(f" × {name} {size}" for name, size in config.split.items() if size > 1)
    split = f" = data-parallel {config.dp_size}{shared}" if shared else ""
    if data.use_dynamic_bsz:
        micro = f"micro-batches of up to {data.max_token_len_per_gpu} tokens"
    elif share is None:
        micro = f"micro-batches of up to {count(data.micro_batch_size_per_gpu, 'row')}"
    else:
        size = data.micro_batch_size_per_gpu
        micro = f"{count(math.ceil(share / size), 'micro-batch')} of {count(size, 'row')}"
    more, each = (" or more", "") if share is None else ("", f"{share} each ")
    engine = f"\n{FSDP_IS_FSDP2}" if config.strategy == "fsdp" else ""
    return (
        f"Batch plan: {count(config.rows_per_step, 'row')}{more} of up to {data.max_length} tokens per step over "
        f"{count(ranks, 'rank')}{split} ({config.trainer.device}), {each}in {micro}{engine}"
    )
