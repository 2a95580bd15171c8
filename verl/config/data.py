"""`data.*`: where prompts come from and how they are cut into batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.schema import Block, key


@dataclass(kw_only=True, slots=True)
class CustomClassConfig(Block):
    path: str | None = key("Python file (or module) of your class.", null="ours", path=True)
    name: str | None = key("Its name in that file.", null="ours")


@dataclass(kw_only=True, slots=True)
class SamplerConfig(Block):
    path: str | None = key(
        "Python file (or module) of a sampler class.", null="shuffled or in order", path=True, aliases=("class_path",)
    )
    name: str | None = key("Its name in that file.", null="shuffled or in order", aliases=("class_name",))


@dataclass(kw_only=True, slots=True)
class DataConfig(Block):
    train_files: list[str] = key(
        "Training prompts: one path, a list, a folder or a hub name.",
        required="$HOME/data/gsm8k/train.parquet",
        path=True,
    )
    val_files: list[str] = key("Validation prompts, likewise; empty: no validation.", null="none", path=True)
    prompt_key: str = key("Column that holds the prompt (a list of {role, content}).")
    system_prompt: str | None = key("Said first where a prompt brings no system message.", null="none")
    reward_fn_key: str = key("Column that says which reward function scores the row.")
    ground_truth_key: str = key("Column of the correct answer, for rows without reward_model.ground_truth.")
    train_batch_size: int = key("Prompts per training step.", min=1)
    gen_batch_size: int = key(
        "Prompts per generation batch when groups are filtered.", null="", follows="data.train_batch_size", min=1
    )
    val_batch_size: int | None = key("Prompts per validation batch.", null="the whole set at once", min=1)
    max_prompt_length: int = key("Longest prompt in tokens.", min=1)
    max_response_length: int = key("Longest response in tokens (all turns together).", min=1)
    max_start_length: int | None = key(
        "Search agent: longest prompt; max_response_length is then one turn, max_prompt_length what precedes the last.",
        null="max_prompt_length; max_response_length is all turns",
        min=1,
    )
    max_turn_length: int = key(
        "Search agent: longest turn of the model in tokens.", null="", follows="data.max_response_length", min=1
    )
    max_obs_length: int = key("Search agent: longest information of one turn in tokens.", min=1)
    filter_overlong_prompts: bool = key("Drop prompts longer than max_prompt_length before training.")
    truncation: str = key("What to do with a longer prompt.", choices=("error", "left", "right", "middle"))
    shuffle: bool = key("Shuffle the training prompts every epoch.")
    seed: int = key("Seed of the run: order of prompts, mini-batches and sampling.", min=0)
    dataloader_num_workers: int = key("Processes that load data.", min=0)
    train_max_samples: int = key("Use only the first rows of the training set; -1: all.", min=-1)
    val_max_samples: int = key("Use only the first rows of the validation set; -1: all.", min=-1)
    return_raw_chat: bool = key("Also keep the messages of each prompt (as raw_prompt); always with a reward model.")
    apply_chat_template_kwargs: dict[str, Any] = key("Arguments for the tokenizer's chat template.")
    custom_cls: CustomClassConfig = key("A dataset class of your own.")
    sampler: SamplerConfig = key("A sampler (curriculum, weighted) of your own.")
