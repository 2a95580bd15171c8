"""Demonstrations of search conversations for a supervised warm start, with the loss on the model's turns only.

A row is {prompt: messages, turns: [{text, by_model}]}. Rows are tokenized exactly as the search agent does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from verl.agent.search_loop import ObservationEncoder
from verl.utils.dataset.rows import Rows, find_files

START, END = "<information>", "</information>"


class Demonstrations(Dataset):
    """For `data.custom_cls` of `verl.trainer.main_sft`. A row may have `data.max_length` tokens."""

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, max_samples: int = -1) -> None:
        self._rows, self._tokenizer, self._max_length = Rows(find_files(data_files)), tokenizer, config.max_length
        self._length = len(self._rows) if max_samples < 0 else min(max_samples, len(self._rows))
        self._encoder = ObservationEncoder(tokenizer, START, END, config.max_length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        row = self._rows[item]
        text = self._tokenizer.apply_chat_template(list(row["prompt"]), tokenize=False, add_generation_prompt=True)
        ids = self._ids(text)
        mask = [0] * len(ids)
        for turn in row["turns"]:
            turn_ids = self._ids(turn["text"]) if turn["by_model"] else self._encoder.wrap(turn["text"])
            ids += turn_ids
            mask += [int(turn["by_model"])] * len(turn_ids)
        if len(ids) > self._max_length:
            raise ValueError(f"data.max_length: {self._rows.where(item)} has {len(ids)} tokens. Raise it.")
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.ones(len(ids), dtype=torch.int64),
            "position_ids": torch.arange(len(ids)),
            "loss_mask": torch.tensor(mask),
        }

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
