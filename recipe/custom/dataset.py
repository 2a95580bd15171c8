"""`CustomRLHFDataset`: a template for a custom dataset. Copy it, change what you need, and configure it:

    python3 -m verl.trainer.main_ppo … data.custom_cls.path=mine.py data.custom_cls.name=CustomRLHFDataset

Only this file is loaded: it may import installed packages, but no other files of its folder.
"""

from __future__ import annotations

import functools
from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset

SYSTEM = "You are a careful assistant. Think first, then answer."


class CustomRLHFDataset(RLHFDataset):
    """The default dataset with two changes: the prompt, and the `extra_info` of the reward function.

    A row of a custom dataset, with or without this base class, is a dict with `input_ids`, `attention_mask` and
    `position_ids` [max_prompt_length], left-padded; `data_source` and `reward_model`; a `uid`, which identifies the
    prompt across runs; and `extra_info` for the reward function. `__init__` must keep these parameters.
    """

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        super().__init__(
            data_files,
            tokenizer,
            config,
            processor=processor,
            max_samples=max_samples,
            chat_template_func=functools.partial(with_system_message, tokenizer),
        )

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = super().__getitem__(item)
        prompt_tokens = int(row["attention_mask"].sum())
        row["extra_info"] = {**row["extra_info"], "prompt_tokens": prompt_tokens}
        return row


def with_system_message(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """The text of a prompt, with our system message if the data has none."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
