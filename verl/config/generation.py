"""`GenerationConfig`: answers to prompts of a file (`main_generation`). `EvalConfig`: their scores (`main_eval`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config import files
from verl.config.block_rules import check_engine, engine_rules, values_present
from verl.config.context_length import LONGER_CONTEXT, limit_of_folder
from verl.config.devices import visible_gpus
from verl.config.problems import Report
from verl.config.resolve import empty_lists
from verl.config.reward import CustomRewardFunctionConfig
from verl.config.rollout import GeneratorConfig
from verl.config.schema import Block, WholeConfig, key


@dataclass(kw_only=True, slots=True)
class GenerationDataConfig(Block):
    path: list[str] = key(
        "Prompts: one path, a list, a folder or a hub name; parquet, json or jsonl.",
        required="$HOME/data/gsm8k/test.parquet",
        path=True,
    )
    output_path: str = key(
        "Parquet file to write: the rows of path with a column `responses`.",
        required="$HOME/data/gsm8k/answers.parquet",
        path=True,
    )
    prompt_key: str = key("Column of the prompt, a text or messages; dots look inside: extra_info.question.")
    system_prompt: str | None = key("Said first where a prompt brings no system message.", null="none")
    n_samples: int = key("Answers per prompt.", min=1, aliases=("../rollout.n",))
    batch_size: int = key(
        "Prompts whose answers are kept as soon as they are whole; a killed run loses the rest.", min=1
    )
    max_prompt_length: int = key("Longest prompt in tokens.", min=1, aliases=("../rollout.prompt_length",))
    truncation: str = key("What to do with a longer prompt.", choices=("error", "left", "right", "middle"))
    max_samples: int = key("Use only the first rows; -1: all.", min=-1)
    apply_chat_template_kwargs: dict[str, Any] = key("Arguments for the tokenizer's chat template.")


@dataclass(kw_only=True, slots=True)
class GenerationModelConfig(Block):
    path: str = key(
        "Local folder, hub name or URL of the model; a global_step_N folder of ours works too.",
        required="Qwen/Qwen2.5-0.5B-Instruct",
        path=True,
    )
    trust_remote_code: bool = key("Run Python code that comes with the model.")
    override_config: dict[str, Any] = key("Values that replace those of the model's own config.json.")


@dataclass(kw_only=True, slots=True)
class GenerationTrainerConfig(Block):
    device: str = key("Where the model runs.", choices=("auto", "cuda", "cpu"))


@dataclass(kw_only=True, slots=True)
class GenerationConfig(WholeConfig):
    data: GenerationDataConfig = key("Prompts and answers.")
    model: GenerationModelConfig = key("The model that answers.")
    rollout: GeneratorConfig = key("How answers are generated.")
    trainer: GenerationTrainerConfig = key("The run.")


@dataclass(kw_only=True, slots=True)
class EvalDataConfig(Block):
    path: list[str] = key(
        "Answered rows, as main_generation writes them: one path, a list or a folder.",
        required="$HOME/data/gsm8k/answers.parquet",
        path=True,
    )
    response_key: str = key("Column of the answers: a list of texts, or one text.")
    reward_fn_key: str = key("Column that says which reward function scores the row.")
    ground_truth_key: str = key("Column of the correct answer, for rows without reward_model.ground_truth.")
    output_path: str | None = key("JSON file for all metrics.", null="not written", path=True)


@dataclass(kw_only=True, slots=True)
class EvalRewardConfig(Block):
    reward_kwargs: dict[str, Any] = key("Arguments for the reward manager: timeout, num_processes, memory_limit_gb.")
    on_error: str = key(
        "When a reward function raises, hangs or returns NaN: stop, or score 0.", choices=("fail", "zero")
    )


@dataclass(kw_only=True, slots=True)
class EvalConfig(WholeConfig):
    data: EvalDataConfig = key("Answers.")
    reward_model: EvalRewardConfig = key("How they are scored.")
    custom_reward_function: CustomRewardFunctionConfig = key("A reward function of your own.")


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
        context_rules(config, report)


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


def context_rules(config: GenerationConfig, report: Report, folder: str | None = None) -> None:
    """The same of answers to the prompts of a file; `folder` is where the model is on this machine."""
    path, rollout, prompt = config.model.path, config.rollout, config.data.max_prompt_length
    limit = None if not path else limit_of_folder(folder or path, config.model.override_config)
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
