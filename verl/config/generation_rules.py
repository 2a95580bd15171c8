"""The rules of `GenerationConfig` and `EvalConfig`: what nulls stand for, what does not fit, what must exist here."""

from __future__ import annotations

from pathlib import Path

from verl.config import files
from verl.config.context_length import generation_context_rules
from verl.config.devices import visible_gpus
from verl.config.generation import EvalConfig, GenerationConfig
from verl.config.problems import Report
from verl.config.resolve import empty_lists
from verl.config.rollout_rules import check_engine, engine_rules
from verl.config.validate import values_present


def resolve_generation(config: GenerationConfig, report: Report) -> None:
    """Fill in every null that stands for something."""
    empty_lists(config)
    if config.trainer.device == "auto":
        config.trainer.device = "cuda" if visible_gpus() else "cpu"
    rollout = config.rollout
    if rollout.dtype == "auto":
        rollout.dtype = "bfloat16" if config.trainer.device == "cuda" else "float32"
    if rollout.max_model_len is None:
        rollout.max_model_len = config.data.max_prompt_length + rollout.max_new_tokens


def validate_generation(config: GenerationConfig, report: Report) -> None:
    """Report every rule that a resolved configuration breaks."""
    values_present(config, "", report)
    data, rollout = config.data, config.rollout
    engine_rules("rollout", rollout, report)
    size = rollout.tensor_model_parallel_size
    if size > 1:
        report.problem(
            "rollout.tensor_model_parallel_size",
            size,
            "generation runs in one process",
            "Set it to 1",
            ("rollout.name",),
        )
    if rollout.max_model_len <= data.max_prompt_length:
        why = f"leaves no room for an answer after a prompt of data.max_prompt_length = {data.max_prompt_length} tokens"
        fix = f"Set it to {data.max_prompt_length + rollout.max_new_tokens}"
        report.problem("rollout.max_model_len", rollout.max_model_len, why, fix, ("data.max_prompt_length",))
    elif rollout.max_model_len < data.max_prompt_length + rollout.max_new_tokens:
        report.notice(
            f"rollout.max_model_len = {rollout.max_model_len}: after a long prompt an answer ends before "
            f"rollout.max_new_tokens = {rollout.max_new_tokens} tokens."
        )
    if data.output_path and not data.output_path.endswith(".parquet"):
        report.problem("data.output_path", data.output_path, "is not the name of a parquet file", "End it in .parquet")
    if data.n_samples > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        report.notice(f"data.n_samples = {data.n_samples}: greedy answers to one prompt are all the same.")


def check_generation(config: GenerationConfig, report: Report) -> None:
    """Report every path that does not exist here, and sequences that the model cannot read."""
    check_engine("rollout", config.rollout, report)
    files.check_paths("data.path", config.data.path, report)
    if config.model.path:
        files.check_model("model.path", config.model.path, report)
        generation_context_rules(config, report)


def resolve_eval(config: EvalConfig, report: Report) -> None:
    """Nothing is left open."""
    empty_lists(config)


def validate_eval(config: EvalConfig, report: Report) -> None:
    """Report keys without a value."""
    values_present(config, "", report)


def check_eval(config: EvalConfig, report: Report) -> None:
    """Report every path that does not exist here."""
    files.check_paths("data.path", config.data.path, report)
    files.check_user_code("custom_reward_function.path", config.custom_reward_function.path, report)
    output = config.data.output_path
    if output and not Path(output).absolute().parent.is_dir():
        report.problem("data.output_path", output, "its folder does not exist", "Make it, or correct the path")
