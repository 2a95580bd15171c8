"""`GenerationConfig`: answers to prompts of a file (`main_generation`). `EvalConfig`: their scores (`main_eval`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
