"""`GenerationConfig` (`main_generation`) and `EvalConfig` (`main_eval`): keys and rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config import files
from verl.config.block_rules import check_engine, engine_rules, values_present
from verl.config.context_length import LONGER_CONTEXT, context_limit_of_folder
from verl.config.devices import visible_gpu_count
from verl.config.problems import Report
from verl.config.resolve import empty_lists
from verl.config.roles import CustomRewardFunctionConfig
from verl.config.rollout import GeneratorConfig
from verl.config.schema import Block, RootConfig, key


@dataclass(kw_only=True, slots=True)
class GenerationDataConfig(Block):
    path: list[str] = key(
        "Prompts: one path, a list, a folder or a hub name; parquet, json or jsonl.",
        required="$HOME/data/gsm8k/test.parquet",
        path=True,
    )
    output_path: str = key(
        "Parquet file to write: the rows of path with an additional column `responses`.",
        required="$HOME/data/gsm8k/answers.parquet",
        path=True,
    )
    prompt_key: str = key("Column of the prompt (text or messages); dots select nested fields: extra_info.question.")
    system_prompt: str | None = key("System message for prompts without one.", null="none")
    n_samples: int = key("Responses per prompt.", min=1, aliases=("../rollout.n",))
    batch_size: int = key("Prompts per batch; responses are saved after each batch.", min=1)
    max_prompt_length: int = key("Largest prompt length in tokens.", min=1, aliases=("../rollout.prompt_length",))
    truncation: str = key("Longer prompts: error, or cut at this side.", choices=("error", "left", "right", "middle"))
    max_samples: int = key("Use only the first rows; -1: all.", min=-1)
    apply_chat_template_kwargs: dict[str, Any] = key("Arguments for the tokenizer's chat template.")


@dataclass(kw_only=True, slots=True)
class GenerationModelConfig(Block):
    path: str = key(
        "Local folder, hub name or URL of the model; a checkpoint folder global_step_N works too.",
        required="Qwen/Qwen2.5-0.5B-Instruct",
        path=True,
    )
    trust_remote_code: bool = key("Run Python code from the model repository.")
    override_config: dict[str, Any] = key("Values that override the model's config.json.")


@dataclass(kw_only=True, slots=True)
class GenerationTrainerConfig(Block):
    device: str = key("Device; auto: cuda if a GPU is found, else cpu.", choices=("auto", "cuda", "cpu"))
    console: str = key("Console output: line (start-up, status line and summary), or full.", choices=("line", "full"))


@dataclass(kw_only=True, slots=True)
class GenerationConfig(RootConfig):
    data: GenerationDataConfig = key("Prompts and responses.")
    model: GenerationModelConfig = key("Model.")
    rollout: GeneratorConfig = key("Engine and sampling.")
    trainer: GenerationTrainerConfig = key("Device and console output.")


@dataclass(kw_only=True, slots=True)
class EvalDataConfig(Block):
    path: list[str] = key(
        "Rows with responses, as written by main_generation: one path, a list or a folder.",
        required="$HOME/data/gsm8k/answers.parquet",
        path=True,
    )
    response_key: str = key("Column of the responses: a list of texts, or one text.")
    reward_fn_key: str = key("Column with the data source, which selects the reward function.")
    ground_truth_key: str = key("Column of the correct answer, for rows without reward_model.ground_truth.")
    output_path: str | None = key("JSON file for all metrics.", null="not written", path=True)


@dataclass(kw_only=True, slots=True)
class EvalRewardConfig(Block):
    reward_kwargs: dict[str, Any] = key("Arguments of the reward manager: timeout, num_processes, memory_limit_gb.")
    on_error: str = key("If a reward fails (exception, timeout, NaN): stop, or score 0.", choices=("fail", "zero"))


@dataclass(kw_only=True, slots=True)
class EvalConfig(RootConfig):
    data: EvalDataConfig = key("Rows with responses.")
    reward_model: EvalRewardConfig = key("Scoring.")
    custom_reward_function: CustomRewardFunctionConfig = key("Custom reward function.")


def resolve_generation(config: GenerationConfig, report: Report) -> None:
    """Replace every null that stands for another value."""
    empty_lists(config)
    if config.trainer.device == "auto":
        config.trainer.device = "cuda" if visible_gpu_count() else "cpu"
    rollout = config.rollout
    if rollout.dtype == "auto":
        rollout.dtype = "bfloat16" if config.trainer.device == "cuda" else "float32"
    if rollout.max_model_len is None:
        rollout.max_model_len = config.data.max_prompt_length + rollout.max_new_tokens


def validate_generation(config: GenerationConfig, report: Report) -> None:
    """Report all problems of a resolved configuration."""
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
        why = f"leaves no room for a response after data.max_prompt_length = {data.max_prompt_length} tokens"
        fix = f"Set it to {data.max_prompt_length + rollout.max_new_tokens}"
        report.problem("rollout.max_model_len", rollout.max_model_len, why, fix, ("data.max_prompt_length",))
    elif rollout.max_model_len < data.max_prompt_length + rollout.max_new_tokens:
        report.notice(
            f"rollout.max_model_len = {rollout.max_model_len}: after a long prompt a response ends before "
            f"rollout.max_new_tokens = {rollout.max_new_tokens} tokens."
        )
    if data.output_path and not data.output_path.endswith(".parquet"):
        report.problem("data.output_path", data.output_path, "is not the name of a parquet file", "End it in .parquet")
    if data.n_samples > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        report.notice(f"data.n_samples = {data.n_samples}: greedy responses to a prompt are equal.")


def check_generation(config: GenerationConfig, report: Report) -> None:
    """Report missing files and packages, and sequences that exceed the model's context."""
    check_engine("rollout", config.rollout, report)
    files.check_paths("data.path", config.data.path, report)
    if config.model.path:
        files.check_model("model.path", config.model.path, report)
        context_rules(config, report)


def resolve_eval(config: EvalConfig, report: Report) -> None:
    """Replace null lists by empty lists."""
    empty_lists(config)


def validate_eval(config: EvalConfig, report: Report) -> None:
    """Report keys without a value."""
    values_present(config, "", report)


def check_eval(config: EvalConfig, report: Report) -> None:
    """Report missing files."""
    files.check_paths("data.path", config.data.path, report)
    files.check_user_code("custom_reward_function.path", config.custom_reward_function.path, report)
    output = config.data.output_path
    if output and not Path(output).absolute().parent.is_dir():
        report.problem("data.output_path", output, "its folder does not exist", "Create it, or correct the path")


def context_rules(config: GenerationConfig, report: Report, folder: str | None = None) -> None:
    """Report sequences that exceed the context of the model; `folder` is its local folder."""
    path, rollout, prompt = config.model.path, config.rollout, config.data.max_prompt_length
    limit = None if not path else context_limit_of_folder(folder or path, config.model.override_config)
    if limit is None or rollout.max_model_len <= limit:
        return
    why = f"is more than the {limit} positions of model.path = {path}"
    fix = f"Set it to {limit} or less, or {LONGER_CONTEXT}"
    if rollout.max_model_len == prompt + rollout.max_new_tokens:
        why += f" (data.max_prompt_length = {prompt} + rollout.max_new_tokens = {rollout.max_new_tokens})"
        fix = f"Shorten one of the two, set it to {limit} or less, or {LONGER_CONTEXT}"
    uses = ("data.max_prompt_length", "rollout.max_new_tokens", "model.path")
    report.problem("rollout.max_model_len", rollout.max_model_len, why, fix, uses)


def check_context_length(config: GenerationConfig, folder: str) -> None:
    """Raise ConfigError if sequences may be longer than the model in the local `folder` supports."""
    report = Report()
    context_rules(config, report, folder)
    report.raise_if_any()
