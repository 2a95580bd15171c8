"""The rules that only `SFTConfig` has: those of prompts that a validation answers."""

from __future__ import annotations

import math

from verl.config import files, names, supervised_rules
from verl.config.context_length import config_of_folder, limit_of_folder
from verl.config.megatron_models import Fit, ModelNumbers
from verl.config.megatron_rules import block_rules
from verl.config.problems import Report
from verl.config.rollout_rules import check_engine, engine_rules, is_installed
from verl.config.sft import SFTConfig

_MEGATRON = "megatron_config"
_ENGINES = ("native", "hf")
_ONLY_FOR_ANSWERS = (
    *("rollout.", "reward_model.", "custom_reward_function.", "trainer.log_val_generations"),
    *("data.val_n", "data.max_prompt_length", "data.reward_fn_key", "data.ground_truth_key"),
)


def resolve(config: SFTConfig, report: Report) -> None:
    """Fill in every null that stands for something."""
    supervised_rules.resolve(config, report)
    sizes, rollout = config.megatron_config, config.rollout
    sizes.dtype = sizes.dtype or ("bf16" if config.trainer.device == "cuda" else "fp32")
    if rollout.dtype == "auto":
        rollout.dtype = "bfloat16" if config.trainer.device == "cuda" else "float32"
    if rollout.max_model_len is None:
        rollout.max_model_len = config.data.max_prompt_length + rollout.max_new_tokens


def validate(config: SFTConfig, report: Report) -> None:
    """Report every rule that a resolved configuration breaks."""
    supervised_rules.validate(config, report)
    _engine(config, report)
    rollout, data = config.rollout, config.data
    if not data.val_prompt_files:
        why = "without data.val_prompt_files, which a validation answers"
        supervised_rules.tell_idle(config, _ONLY_FOR_ANSWERS, why, report)
        return
    engine_rules("rollout", rollout, report)
    if rollout.name not in _ENGINES:
        why = "answers in supervised fine-tuning come from the ranks' own processes"
        report.problem("rollout.name", rollout.name, why, f"Set it to {' or '.join(_ENGINES)}")
    if rollout.tensor_model_parallel_size > 1:
        size, why = rollout.tensor_model_parallel_size, "every rank has a copy of the engine"
        report.problem("rollout.tensor_model_parallel_size", size, why, "Set it to 1")
    if rollout.max_model_len <= data.max_prompt_length:
        why = f"leaves no room for an answer after a prompt of data.max_prompt_length = {data.max_prompt_length} tokens"
        fix = f"Set it to {data.max_prompt_length + rollout.max_new_tokens}"
        report.problem("rollout.max_model_len", rollout.max_model_len, why, fix, ("data.max_prompt_length",))


def _engine(config: SFTConfig, report: Report) -> None:
    """What the megatron engine cannot do, and its keys where another runs."""
    if config.strategy != "megatron":
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            size = config.megatron_config[name]
            if size > 1:
                why = f"strategy = {config.strategy} does not split a model this way"
                fix = "Leave the key out, or set strategy=megatron"
                report.problem(f"{_MEGATRON}.{name}", size, why, fix, ("strategy",))
        supervised_rules.tell_idle(config, (f"{_MEGATRON}.",), f"with strategy = {config.strategy}", report)
        return
    lora = ("model.lora_rank", config.model.lora_rank)
    block_rules("", config, lora, (config.ranks, "the run"), report)
    each = math.prod(config.split.values())
    if config.ranks % each:
        shared = " × ".join(f"{name} {size}" for name, size in config.split.items())
        why = f"{shared} take {each} ranks, which do not divide the {config.ranks} of the run"
        size = config.megatron_config.tensor_model_parallel_size
        uses = ("trainer.n_gpus_per_node", "trainer.nnodes")
        report.problem(f"{_MEGATRON}.tensor_model_parallel_size", size, why, "Lower one of them, or add ranks", uses)


def check_environment(config: SFTConfig, report: Report) -> None:
    """Report every path that does not exist here and every package that is asked for and missing."""
    supervised_rules.check_environment(config, report)
    if config.strategy == "megatron":
        _check_megatron(config, report)
    if not config.data.val_prompt_files:
        return
    check_engine("rollout", config.rollout, report)
    files.check_paths("data.val_prompt_files", config.data.val_prompt_files, report)
    files.check_user_code("custom_reward_function.path", config.custom_reward_function.path, report)
    limit = limit_of_folder(config.model.path or "", config.model.override_config)
    if limit is not None and config.rollout.max_model_len > limit:
        why = f"is more than the {limit} positions of model.path = {config.model.path}"
        fix = "Shorten data.max_prompt_length or rollout.max_new_tokens"
        report.problem("rollout.max_model_len", config.rollout.max_model_len, why, fix, ("model.path",))


def _check_megatron(config: SFTConfig, report: Report) -> None:
    row, sizes = names.TRAINING_ENGINES["megatron"], config.megatron_config
    if not is_installed(row.package):
        report.broken(
            "strategy", "megatron", f"{row.package} is not installed here", f"Run {row.install}; or set strategy=fsdp2"
        )
    if sizes.dist_checkpointing_path:
        files.must_exist(f"{_MEGATRON}.dist_checkpointing_path", sizes.dist_checkpointing_path, report)
    found = config_of_folder(config.model.path or "", config.model.override_config)
    numbers = None if found is None else ModelNumbers.of(found)
    if numbers is not None:
        Fit(_MEGATRON, sizes, numbers, config.ranks, report).check()
