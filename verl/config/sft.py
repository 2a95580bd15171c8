"""`SFTConfig`: keys and rules of supervised fine-tuning (`verl.trainer.main_sft`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl.config import files, names, supervised
from verl.config.block_rules import check_engine, engine_rules, is_installed
from verl.config.context_length import context_limit_of_folder, read_model_config
from verl.config.engine import MegatronConfig
from verl.config.generation import EvalRewardConfig
from verl.config.megatron import ModelDimensions, ParallelSizeCheck, megatron_block_rules
from verl.config.problems import Report, install_command
from verl.config.roles import CustomRewardFunctionConfig
from verl.config.rollout import GeneratorConfig
from verl.config.schema import key
from verl.config.supervised import SupervisedConfig, SupervisedDataConfig, SupervisedTrainerConfig


@dataclass(kw_only=True, slots=True)
class SFTDataConfig(SupervisedDataConfig):
    prompt_key: str = key("Column of the prompt (text or messages); dots select nested fields: extra_info.question.")
    response_key: str = key("Column of the target response (text); dots select nested fields.")
    messages_key: str = key(
        "Column of conversations; if a file has it, it replaces prompt_key and response_key.",
        aliases=("multiturn.messages_key",),
    )
    tools_key: str = key("Optional column with tools (schemas, or JSON text).", aliases=("multiturn.tools_key",))
    enable_thinking_key: str = key(
        "Optional column that enables thinking in the chat template, per conversation.",
        aliases=("multiturn.enable_thinking_key",),
    )
    # Declared after the keys with aliases multiturn.<key>: aliases are resolved in this order, and multiturn is a flag.
    multiturn: bool = key("Train on all assistant turns, not only on the last one.", aliases=("multiturn.enable",))
    val_prompt_files: list[str] = key(
        "Prompts for generation in validation, scored as in main_ppo; empty: none.", null="none", path=True
    )
    val_n: int = key("Responses per prompt of val_prompt_files.", min=1)
    max_prompt_length: int = key("Largest prompt length of val_prompt_files in tokens.", min=1)
    reward_fn_key: str = key("Column of the data source in val_prompt_files, which selects the reward function.")
    ground_truth_key: str = key(
        "Column of the correct answer in val_prompt_files, for rows without reward_model.ground_truth."
    )
    rewritten_turns: str = key(
        "If the chat template rewrites earlier turns (e.g. drops thinking): split into rows, or raise an error.",
        choices=("split", "error"),
        synonyms={True: "split", False: "error"},
        aliases=("ignore_input_ids_mismatch",),
    )


@dataclass(kw_only=True, slots=True)
class SFTTrainerConfig(SupervisedTrainerConfig):
    log_val_generations: int = key("Responses to data.val_prompt_files for trackers; the console shows three.", min=0)


@dataclass(kw_only=True, slots=True)
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig = key("Rows and batches.")
    strategy: str = key(
        "Training engine (fsdp and fsdp2 are the same one).",
        choices=names.STRATEGIES,
        aliases=("engine", "model.strategy"),
    )
    megatron_config: MegatronConfig = key("Megatron engine.", aliases=("megatron",))
    rollout: GeneratorConfig = key("Generation for data.val_prompt_files.")
    reward_model: EvalRewardConfig = key("Scoring of the responses to data.val_prompt_files.")
    custom_reward_function: CustomRewardFunctionConfig = key(
        "Custom reward function for the responses to data.val_prompt_files."
    )
    trainer: SFTTrainerConfig = key("Run: devices, steps, checkpoints, trackers.")

    @property
    def split(self) -> dict[str, int]:
        """Number of ranks that one copy of the model is split over, by kind of parallelism."""
        if self.strategy != "megatron":
            return {"Ulysses": self.ulysses_sequence_parallel_size}
        megatron = self.megatron_config
        return {
            "TP": megatron.tensor_model_parallel_size,
            "PP": megatron.pipeline_model_parallel_size,
            "CP": megatron.context_parallel_size,
        }

    @property
    def ranks_per_sequence(self) -> int:
        """Number of ranks that share the tokens of a sequence."""
        split = self.split
        return split.get("Ulysses") or split["CP"]


_MEGATRON = "megatron_config"
# Rollout engines that run in the processes of the trained model.
_IN_PROCESS_ENGINES = ("native", "hf")
# Keys without effect if data.val_prompt_files is empty; a name with a final dot means the whole block.
_GENERATION_KEYS = (
    *("rollout.", "reward_model.", "custom_reward_function.", "trainer.log_val_generations"),
    *("data.val_n", "data.max_prompt_length", "data.reward_fn_key", "data.ground_truth_key"),
)


def resolve(config: SFTConfig, report: Report) -> None:
    """Replace every null or auto by the value that it stands for."""
    supervised.resolve(config, report)
    sizes, rollout = config.megatron_config, config.rollout
    sizes.dtype = sizes.dtype or ("bf16" if config.trainer.device == "cuda" else "fp32")
    if rollout.dtype == "auto":
        rollout.dtype = "bfloat16" if config.trainer.device == "cuda" else "float32"
    if rollout.max_model_len is None:
        rollout.max_model_len = config.data.max_prompt_length + rollout.max_new_tokens


def validate(config: SFTConfig, report: Report) -> None:
    """Report all problems of a resolved configuration."""
    supervised.validate(config, report)
    _engine_rules(config, report)
    rollout, data = config.rollout, config.data
    if not data.val_prompt_files:
        why = "without data.val_prompt_files"
        supervised.report_unused(config, _GENERATION_KEYS, why, report)
        return
    engine_rules("rollout", rollout, report)
    if rollout.name not in _IN_PROCESS_ENGINES:
        why = "supervised fine-tuning generates in the processes of its ranks"
        report.problem("rollout.name", rollout.name, why, f"Set it to {' or '.join(_IN_PROCESS_ENGINES)}")
    if rollout.tensor_model_parallel_size > 1:
        size, why = rollout.tensor_model_parallel_size, "every rank runs its own engine"
        report.problem("rollout.tensor_model_parallel_size", size, why, "Set it to 1")
    if rollout.max_model_len <= data.max_prompt_length:
        why = f"leaves no room for a response after data.max_prompt_length = {data.max_prompt_length} tokens"
        fix = f"Set it to {data.max_prompt_length + rollout.max_new_tokens}"
        report.problem("rollout.max_model_len", rollout.max_model_len, why, fix, ("data.max_prompt_length",))


def _engine_rules(config: SFTConfig, report: Report) -> None:
    """Report problems of the megatron engine, or its keys with another strategy."""
    if config.strategy != "megatron":
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            size = config.megatron_config[name]
            if size > 1:
                why = f"strategy = {config.strategy} does not support this parallelism"
                fix = "Leave the key out, or set strategy=megatron"
                report.problem(f"{_MEGATRON}.{name}", size, why, fix, ("strategy",))
        supervised.report_unused(config, (f"{_MEGATRON}.",), f"with strategy = {config.strategy}", report)
        return
    lora = ("model.lora_rank", config.model.lora_rank)
    megatron_block_rules("", config, lora, (config.ranks, "the run"), report)
    ranks_per_copy = math.prod(config.split.values())
    if config.ranks % ranks_per_copy:
        split = " × ".join(f"{name} {size}" for name, size in config.split.items())
        why = f"{split} take {ranks_per_copy} ranks, which does not divide the {config.ranks} ranks of the run"
        size = config.megatron_config.tensor_model_parallel_size
        uses = ("trainer.n_gpus_per_node", "trainer.nnodes")
        report.problem(f"{_MEGATRON}.tensor_model_parallel_size", size, why, "Lower one of them, or add ranks", uses)


def check_environment(config: SFTConfig, report: Report) -> None:
    """Report missing files and packages."""
    supervised.check_environment(config, report)
    if config.strategy == "megatron":
        _check_megatron(config, report)
    if not config.data.val_prompt_files:
        return
    check_engine("rollout", config.rollout, report)
    files.check_paths("data.val_prompt_files", config.data.val_prompt_files, report)
    files.check_user_code("custom_reward_function.path", config.custom_reward_function.path, report)
    limit = context_limit_of_folder(config.model.path or "", config.model.override_config)
    if limit is not None and config.rollout.max_model_len > limit:
        why = f"is more than the {limit} positions of model.path = {config.model.path}"
        fix = "Shorten data.max_prompt_length or rollout.max_new_tokens"
        report.problem("rollout.max_model_len", config.rollout.max_model_len, why, fix, ("model.path",))


def _check_megatron(config: SFTConfig, report: Report) -> None:
    """Report a missing package or file of the megatron engine, and parallel sizes that do not divide the model."""
    engine, sizes = names.TRAINING_ENGINES["megatron"], config.megatron_config
    if not is_installed(engine.package):
        fix = f"Run {install_command(engine.install)}; or set strategy=fsdp2"
        report.invalid("strategy", "megatron", f"{engine.package} is not installed", fix)
    if sizes.dist_checkpointing_path:
        files.must_exist(f"{_MEGATRON}.dist_checkpointing_path", sizes.dist_checkpointing_path, report)
    model = read_model_config(config.model.path or "", config.model.override_config)
    shape = None if model is None else ModelDimensions.from_config(model)
    if shape is not None:
        ParallelSizeCheck(_MEGATRON, sizes, shape, config.ranks, report).check()
