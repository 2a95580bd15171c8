"""The rules that only `SFTConfig` has: those of prompts that a validation answers."""

from __future__ import annotations

from verl.config import files, supervised_rules
from verl.config.context_length import limit_of_folder
from verl.config.problems import Report
from verl.config.rollout_rules import check_engine, engine_rules
from verl.config.sft import SFTConfig

_ENGINES = ("native", "hf")
_ONLY_FOR_ANSWERS = ("rollout.", "reward_model.", "custom_reward_function.", "data.val_n")


def resolve(config: SFTConfig, report: Report) -> None:
    """Fill in every null that stands for something."""
    supervised_rules.resolve(config, report)
    rollout = config.rollout
    if rollout.dtype == "auto":
        rollout.dtype = "bfloat16" if config.trainer.device == "cuda" else "float32"
    if rollout.max_model_len is None:
        rollout.max_model_len = config.data.max_prompt_length + rollout.max_new_tokens


def validate(config: SFTConfig, report: Report) -> None:
    """Report every rule that a resolved configuration breaks."""
    supervised_rules.validate(config, report)
    rollout, data = config.rollout, config.data
    if not data.val_prompt_files:
        idle = sorted(name for name in config.changed if name.startswith(_ONLY_FOR_ANSWERS))
        if idle:
            report.notice(f"{', '.join(idle)}: no effect without data.val_prompt_files, which a validation answers.")
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


def check_environment(config: SFTConfig, report: Report) -> None:
    """Report every path that does not exist here and every package that is asked for and missing."""
    supervised_rules.check_environment(config, report)
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
