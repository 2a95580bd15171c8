"""SFTDataset: questions with answers, or conversations, as rows whose loss falls on the answer only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.utils.dataset.chat import Messages, PromptEncoder, as_messages
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import DataError, Rule, chat_rule, refuse_problems, text_rule
from verl.utils.dataset.rows import Rows, value_at
from verl.utils.dataset.tokens import TokenStore, truncated


@dataclass(kw_only=True)
class SFTDataConfig:
    """Which columns hold what, and how long a row may be. A key with dots looks inside: `extra_info.question`."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    max_length: int = 1024
    truncation: str = "error"
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any) -> SFTDataConfig:
        """Ours as it is; of any other object or mapping, the keys we know."""
        if isinstance(config, cls):
            return config
        known = [item.name for item in fields(cls)]
        return cls(**{name: config[name] for name in known if config is not None and name in config})


class SFTDataset(Dataset):
    """Rows of files as token sequences.

    Where a file has the column `messages_key`, a row is that conversation and the loss falls on its last answer; else
    the prompt (text or messages) is followed by the response. A row is a dict of [its own length] tensors: `input_ids`,
    `attention_mask`, `position_ids`, and `loss_mask`, which is 1 on answer tokens (the end token included): the loss of
    a token is that of predicting it.

    All rows are tokenised now with `truncation=error`, which must know their lengths; otherwise each when asked for.
    """

    last_turn_only: ClassVar[bool] = True

    def __init__(
        self,
        data_files: str | os.PathLike[str] | Sequence[str],
        tokenizer: Any,
        config: SFTDataConfig | Mapping[str, Any],
        max_samples: int = -1,
        *,
        split: str | None = None,
    ) -> None:
        self.config = SFTDataConfig.of(config)
        self.tokenizer = tokenizer
        self.rows = Rows(find_files(data_files, split))
        self._from_messages = self.config.messages_key in self.rows.columns
        refuse_problems(self.rows, self._rules())
        self._encoder = PromptEncoder(tokenizer, self.config.apply_chat_template_kwargs)
        self._length = len(self.rows) if max_samples < 0 else min(max_samples, len(self.rows))
        self._stored: tuple[TokenStore, TokenStore] | None = None
        if self.config.truncation == "error":
            encoded = list(self._encode_all())
            self._stored = TokenStore.of(ids for ids, _ in encoded), TokenStore.of(mask for _, mask in encoded)
            self._refuse_overlong(self._stored[0].lengths)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        limit, how = self.config.max_length, self.config.truncation
        row = (store[item] for store in self._stored) if self._stored else self._encode(item, self.rows[item])
        ids, mask = (truncated(tokens, limit, how) for tokens in row)
        return {
            "input_ids": torch.tensor(ids, dtype=torch.int64),
            "attention_mask": torch.ones(len(ids), dtype=torch.int64),
            "position_ids": torch.arange(len(ids)),
            "loss_mask": torch.tensor(mask, dtype=torch.int64),
        }

    def messages_of(self, row: Mapping[str, Any]) -> Messages:
        """The conversation of a row of the file; the loss falls on the assistant's part of it."""
        if self._from_messages:
            return as_messages(row[self.config.messages_key])
        prompt, response = value_at(row, self.config.prompt_key), value_at(row, self.config.response_key)
        return [*as_messages(prompt), {"role": "assistant", "content": response}]

    def _rules(self) -> list[Rule]:
        """The columns are there and hold what they should, whichever of the two forms the file has."""
        if self._from_messages:
            return [chat_rule(self.config.messages_key, "data.messages_key")]
        return [
            chat_rule(self.config.prompt_key, "data.prompt_key"),
            text_rule(self.config.response_key, "data.response_key"),
        ]

    def _encode(self, number: int, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        try:
            return self._encoder.encode_conversation(self.messages_of(row), self.last_turn_only)
        except ValueError as error:
            raise DataError([f"{self.rows.where(number)}: {error}"]) from error

    def _encode_all(self) -> Iterator[tuple[list[int], list[int]]]:
        keys = (self.config.messages_key, _column(self.config.prompt_key), _column(self.config.response_key))
        for first, rows in self.rows.batches(keys):
            for number, row in enumerate(rows[: max(0, self._length - first)], start=first):
                yield self._encode(number, row)

    def _refuse_overlong(self, lengths: np.ndarray) -> None:
        limit = self.config.max_length
        long = np.flatnonzero(lengths > limit)
        if len(long):
            raise DataError(
                [
                    f"{self.rows.where(int(long[0]))} (and {len(long) - 1} more): {lengths[long[0]]} tokens are more "
                    f"than data.max_length = {limit} (the longest row has {lengths.max()}). Raise it, or set "
                    "data.truncation=right or left."
                ]
            )


def _column(key: str) -> str:
    return key.split(".")[0]
