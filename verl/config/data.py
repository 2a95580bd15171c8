"""`data.*`: prompt files, columns, lengths and batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.schema import Block, key


@dataclass(kw_only=True, slots=True)
class CustomClassConfig(Block):
    path: str | None = key("Python file (or module) of a custom class.", null="the built-in class", path=True)
    name: str | None = key("Name of the class.", null="the built-in class")


@dataclass(kw_only=True, slots=True)
class SamplerConfig(Block):
    path: str | None = key(
        "Python file (or module) of a sampler class.", null="by data.shuffle", path=True, aliases=("class_path",)
    )
    name: str | None = key("Name of the class.", null="by data.shuffle", aliases=("class_name",))


@dataclass(kw_only=True, slots=True)
class DataConfig(Block):
    train_files: list[str] = key(
        "Training prompts: one path, a list, a folder or a hub name.",
        required="$HOME/data/gsm8k/train.parquet",
        path=True,
    )
    val_files: list[str] = key("Validation prompts, in the same forms; empty: no validation.", null="none", path=True)
    prompt_key: str = key("Column of the prompt (a list of {role, content}).")
    system_prompt: str | None = key("System message for prompts without one.", null="none")
    reward_fn_key: str = key("Column with the data source, which selects the reward function.")
    ground_truth_key: str = key("Column of the correct answer, for rows without reward_model.ground_truth.")
    train_batch_size: int = key("Prompts per training step.", min=1)
    gen_batch_size: int = key(
        "Prompts per generation batch with algorithm.filter_groups.", follows="data.train_batch_size", min=1
    )
    val_batch_size: int | None = key("Prompts per validation batch.", null="the whole set at once", min=1)
    max_prompt_length: int = key("Largest prompt length in tokens.", min=1)
    max_response_length: int = key("Largest response length in tokens (all turns together).", min=1)
    max_start_length: int | None = key(
        "Search agent: prompt length; then max_prompt_length is the context, max_response_length a turn (Search-R1).",
        null="max_prompt_length is the prompt, max_response_length all turns",
        min=1,
    )
    max_turn_length: int = key(
        "Search agent: largest number of tokens the model generates per turn.",
        follows="data.max_response_length",
        min=1,
    )
    max_obs_length: int = key("Search agent: largest number of tokens of search results per turn.", min=1)
    filter_overlong_prompts: bool = key("Drop prompts longer than max_prompt_length before training.")
    truncation: str = key("Longer prompts: error, or cut at this side.", choices=("error", "left", "right", "middle"))
    shuffle: bool = key("Shuffle the training prompts every epoch.")
    seed: int = key("Seed of the run: prompt order, mini-batches and sampling.", min=0)
    dataloader_num_workers: int = key("Data loader processes.", min=0)
    train_max_samples: int = key("Use only the first rows of the training set; -1: all.", min=-1)
    val_max_samples: int = key("Use only the first rows of the validation set; -1: all.", min=-1)
    return_raw_chat: bool = key("Keep the messages of prompts (column raw_prompt); on with reward models and agents.")
    apply_chat_template_kwargs: dict[str, Any] = key("Arguments for the tokenizer's chat template.")
    custom_cls: CustomClassConfig = key("Custom dataset class.")
    sampler: SamplerConfig = key("Custom sampler (e.g. curriculum, weighted).")
