"""`CustomRLHFDataset`: a template for a dataset of your own. Copy it, change what you need, and name it:

    python3 -m verl.trainer.main_ppo … data.custom_cls.path=mine.py data.custom_cls.name=CustomRLHFDataset

It is loaded from that one file: it may import what is installed, and nothing that lies beside it.
"""

from __future__ import annotations

import functools
from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset

SYSTEM = "You are a careful assistant. Think first, then answer."


class CustomRLHFDataset(RLHFDataset):
    """The usual dataset with two changes: what the model is asked, and what the reward is told.

    A row of your own class, built on ours or not, is a dict with `input_ids`, `attention_mask` and `position_ids`
    [max_prompt_length], left-padded; `data_source` and `reward_model`; a `uid`, the same for the same prompt in every
    run; and anything else your reward function wants in `extra_info`. `__init__` keeps these parameters.
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
    """The text of a prompt, with our system message where the data brings none."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
