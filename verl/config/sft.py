"""`SFTConfig`: the whole configuration of supervised fine-tuning (`verl.trainer.main_sft`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl.config import files, names, supervised
from verl.config.block_rules import check_engine, engine_rules, is_installed
from verl.config.context_length import config_of_folder, limit_of_folder
from verl.config.engine import MegatronConfig
from verl.config.generation import EvalRewardConfig
from verl.config.megatron import Fit, ModelNumbers, block_rules
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


_MEGATRON = "megatron_config"
_ENGINES = ("native", "hf")
_ONLY_FOR_ANSWERS = (
    *("rollout.", "reward_model.", "custom_reward_function.", "trainer.log_val_generations"),
    *("data.val_n", "data.max_prompt_length", "data.reward_fn_key", "data.ground_truth_key"),
)


def resolve(config: SFTConfig, report: Report) -> None:
    """Fill in every null that stands for something."""
    supervised.resolve(config, report)
    sizes, rollout = config.megatron_config, config.rollout
    sizes.dtype = sizes.dtype or ("bf16" if config.trainer.device == "cuda" else "fp32")
    if rollout.dtype == "auto":
        rollout.dtype = "bfloat16" if config.trainer.device == "cuda" else "float32"
    if rollout.max_model_len is None:
        rollout.max_model_len = config.data.max_prompt_length + rollout.max_new_tokens


def validate(config: SFTConfig, report: Report) -> None:
    """Report every rule that a resolved configuration breaks."""
    supervised.validate(config, report)
    _engine(config, report)
    rollout, data = config.rollout, config.data
    if not data.val_prompt_files:
        why = "without data.val_prompt_files, which a validation answers"
        supervised.tell_idle(config, _ONLY_FOR_ANSWERS, why, report)
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
        supervised.tell_idle(config, (f"{_MEGATRON}.",), f"with strategy = {config.strategy}", report)
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
    supervised.check_environment(config, report)
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
