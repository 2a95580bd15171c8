"""`SFTConfig`: the whole configuration of supervised fine-tuning (`verl.trainer.main_sft`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.config import names
from verl.config.engine import MegatronConfig
from verl.config.generation import EvalRewardConfig
from verl.config.problems import Report
from verl.config.reward import CustomRewardFunctionConfig
from verl.config.rollout import GeneratorConfig
from verl.config.schema import key
from verl.config.supervised import SupervisedConfig, SupervisedDataConfig, SupervisedTrainerConfig


@dataclass(kw_only=True, slots=True)
class SFTDataConfig(SupervisedDataConfig):
    prompt_key: str = key("Column of the prompt, a text or messages; dots look inside: extra_info.question.")
    response_key: str = key("Column of the answer to learn, a text; dots look inside.")
    messages_key: str = key(
        "Column of whole conversations; where a file has it, it is used instead of the two.",
        aliases=("multiturn.messages_key",),
    )
    tools_key: str = key(
        "Column of a conversation's tools, if there is one: schemas, or their JSON text.",
        aliases=("multiturn.tools_key",),
    )
    enable_thinking_key: str = key(
        "Column that switches the template's thinking for a conversation, if there is one.",
        aliases=("multiturn.enable_thinking_key",),
    )
    # After those that are written below it elsewhere.
    multiturn: bool = key(
        "Learn everything the assistant says in a conversation, not only its last answer.",
        aliases=("multiturn.enable",),
    )
    val_prompt_files: list[str] = key(
        "Prompts that the model answers at every validation, scored: rows as main_ppo's; empty: none.",
        null="none",
        path=True,
    )
    val_n: int = key("Answers to each of them.", min=1)
    max_prompt_length: int = key("Longest of them in tokens.", min=1)
    reward_fn_key: str = key("Their column that says which reward function scores the answer.")
    ground_truth_key: str = key("Their column of the correct answer, for rows without reward_model.ground_truth.")
    rewritten_turns: str = key(
        "Where the template rewrites earlier turns (drops thinking): a row of each of its texts, or refuse.",
        choices=("split", "error"),
        synonyms={True: "split", False: "error"},
        aliases=("ignore_input_ids_mismatch",),
    )


@dataclass(kw_only=True, slots=True)
class SFTTrainerConfig(SupervisedTrainerConfig):
    log_val_generations: int = key(
        "Answers to data.val_prompt_files that every tracker gets; the console shows three.", min=0
    )


@dataclass(kw_only=True, slots=True)
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig = key("Rows and batches.")
    strategy: str = key(
        "Training engine (fsdp and fsdp2 are the same one).",
        choices=names.STRATEGIES,
        aliases=("engine", "model.strategy"),
    )
    megatron_config: MegatronConfig = key("The megatron engine.", aliases=("megatron",))
    rollout: GeneratorConfig = key("How prompts of data.val_prompt_files are answered.")
    reward_model: EvalRewardConfig = key("How those answers are scored.")
    custom_reward_function: CustomRewardFunctionConfig = key("A reward function of your own for them.")
    trainer: SFTTrainerConfig = key("The run.")

    @property
    def split(self) -> dict[str, int]:
        if self.strategy != "megatron":
            return {"Ulysses": self.ulysses_sequence_parallel_size}
        sizes = self.megatron_config
        stages = sizes.pipeline_model_parallel_size
        return {"TP": sizes.tensor_model_parallel_size, "PP": stages, "CP": sizes.context_parallel_size}

    @property
    def sharing(self) -> int:
        split = self.split
        return split.get("Ulysses") or split["CP"]


def old_spellings(values: dict[str, Any], report: Report) -> None:
    """Of plain values: `data.prompt_dict_keys` and `response_dict_keys` name what is inside of a column."""
    data = values.get("data")
    if not isinstance(data, Mapping):
        return
    values["data"] = data = dict(data)
    for name in ("prompt", "response"):
        inside = data.pop(f"{name}_dict_keys", None)
        if inside:
            parts = [inside] if isinstance(inside, str) else inside
            data[f"{name}_key"] = ".".join([str(data[f"{name}_key"]), *map(str, parts)])
            report.notice(f"data.{name}_dict_keys is read as data.{name}_key={data[f'{name}_key']}.")
