"""SFTDataset and MultiTurnSFTDataset: prompts with responses, or conversations, with a loss on the answers only."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.utils.dataset.chat import Messages, as_messages, as_tools
from verl.utils.dataset.conversation import ConversationEncoder, Pieces, WeightedTokens
from verl.utils.dataset.problems import DataError, RowRule, raise_missing_columns, raise_problems, sft_rules
from verl.utils.dataset.rows import Rows, bool_at, find_files, value_at
from verl.utils.dataset.tokens import WEIGHTS, TokenStore, truncate

logger = logging.getLogger(__name__)

_SAMPLE_CHARACTERS = 1200  # of the sample in the log

# Row number in the files, token ids and loss weights.
EncodedRow = tuple[int, np.ndarray, np.ndarray]


@dataclass(kw_only=True)
class SFTDatasetConfig:
    """Names of columns, and the maximum length of a row. A key with dots is a nested field: `extra_info.question`."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    tools_key: str = "tools"
    enable_thinking_key: str = "enable_thinking"
    rewritten_turns: str = "split"
    max_length: int = 1024
    truncation: str = "error"
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Any) -> SFTDatasetConfig:
        """Return a SFTDatasetConfig unchanged; from any other mapping, take the known keys."""
        if isinstance(config, cls):
            return config
        known = [item.name for item in fields(cls)]
        return cls(**{name: config[name] for name in known if config is not None and name in config})


class SFTDataset(Dataset):
    """Rows of files as token sequences.

    If a file has the column `messages_key`, a row is that conversation (with the tools of `tools_key`), and the loss
    falls on its last answer, or is weighted by the `loss` of each message; otherwise the prompt (text or messages) is
    followed by the response. An item is a dict of tensors [length]: `input_ids`, `attention_mask`, `position_ids`, and
    `loss_mask` with the weight of predicting each token, 1 on answer tokens including the end token. A conversation
    becomes several items if the chat template rewrites its earlier turns.

    All rows are tokenised by the constructor, so rows that the chat template rejects are found at once. Rows whose
    answers are truncated completely are left out, with a warning.
    """

    read_in_thread = True
    """Items may be read in another thread (`BatchLoader`)."""

    last_turn_only: ClassVar[bool] = True

    def __init__(
        self,
        data_files: str | os.PathLike[str] | Sequence[str],
        tokenizer: Any,
        config: SFTDatasetConfig | Mapping[str, Any],
        max_samples: int = -1,
        *,
        split: str | None = None,
    ) -> None:
        self.config = SFTDatasetConfig.from_config(config)
        self.tokenizer = tokenizer
        self.rows = Rows(find_files(data_files, split))
        if split != "validation":
            raise_missing_columns(self.rows, self.config, ("messages_key", "tools_key", "enable_thinking_key"))
        self._from_messages = self.config.messages_key in self.rows.columns
        raise_problems(self.rows, self._rules())
        splits = self.config.rewritten_turns == "split"
        self._encoder = ConversationEncoder(
            tokenizer, self.config.apply_chat_template_kwargs, self.last_turn_only, splits
        )
        self._conversations = len(self.rows) if max_samples < 0 else min(max_samples, len(self.rows))
        self._ids, self._weights = self._store()
        if self._conversations:
            self._log_sample()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        limit, how = self.config.max_length, self.config.truncation
        ids, weights = (truncate(store[item], limit, how) for store in (self._ids, self._weights))
        is_mask = bool(((weights == 0) | (weights == 1)).all())
        # numpy converts small arrays several times as fast as torch.
        return {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "attention_mask": torch.ones(len(ids), dtype=torch.int64),
            "position_ids": torch.arange(len(ids)),
            "loss_mask": torch.from_numpy(weights.astype(np.int64 if is_mask else np.float32)),
        }

    def messages_of(self, row: Mapping[str, Any]) -> Messages:
        """Return the conversation of a row of the file."""
        if self._from_messages:
            key = self.config.messages_key
            if isinstance(row[key], str):
                raise ValueError(f"{key!r} is a string. Write it as a list of {{role, content}}.")
            return as_messages(row[key])
        prompt, response = value_at(row, self.config.prompt_key), value_at(row, self.config.response_key)
        return [*as_messages(prompt), {"role": "assistant", "content": response}]

    def _rules(self) -> list[RowRule]:
        """Rules for the columns of the form that the files have."""
        return sft_rules(self.config, self.rows.columns)

    def _render(self, number: int, row: Mapping[str, Any]) -> list[Pieces]:
        config = self.config
        try:
            tools = as_tools(value_at(row, config.tools_key), config.tools_key)
            thinking = bool_at(row, config.enable_thinking_key)
            kwargs = {} if thinking is None else {"enable_thinking": thinking}
            return self._encoder.render(self.messages_of(row), tools, **kwargs)
        except ValueError as error:
            raise DataError([f"{self.rows.where(number)}: {error}"]) from error

    def _encode_all(self) -> Iterator[tuple[int, WeightedTokens]]:
        config = self.config
        keys = (config.messages_key, config.prompt_key, config.response_key, config.tools_key)
        columns = [key.split(".")[0] for key in (*keys, config.enable_thinking_key)]
        for first, rows in self.rows.batches(columns):
            if first >= self._conversations:
                return
            used = rows[: self._conversations - first]
            rendered = [self._render(number, row) for number, row in enumerate(used, start=first)]
            for number, items in enumerate(self._encoder.tokenize(rendered), start=first):
                yield from ((number, item) for item in items)

    def _store(self) -> tuple[TokenStore, TokenStore]:
        """Tokenise all rows; the items of a conversation are consecutive."""
        encoded = [
            (number, np.array(row.ids, np.int32), np.array(row.weights, np.float32))
            for number, row in self._encode_all()
        ]
        if len(encoded) > self._conversations:
            logger.info(
                "%d conversations become %d rows: the chat template rewrites earlier turns when later ones are added,"
                " so each text is a row of its own (data.rewritten_turns)",
                self._conversations,
                len(encoded),
            )
        if self.config.truncation == "error":
            self._check_lengths(np.array([len(ids) for _, ids, _ in encoded]), [number for number, _, _ in encoded])
        else:
            encoded = self._drop_truncated_answers(encoded)
        return (
            TokenStore.from_sequences(ids for _, ids, _ in encoded),
            TokenStore.from_sequences((weights for _, _, weights in encoded), WEIGHTS),
        )

    def _drop_truncated_answers(self, encoded: list[EncodedRow]) -> list[EncodedRow]:
        """Drop rows whose answers are truncated completely: they would only take the place of others."""
        limit, how = self.config.max_length, self.config.truncation
        without_answer = [not truncate(weights, limit, how).any() for _, _, weights in encoded]
        if not any(without_answer):
            return encoded
        first = self.rows.where(encoded[without_answer.index(True)][0])
        summary = (
            f"{first} (and {sum(without_answer) - 1} more of {len(encoded)}): "
            f"data.truncation={how} cuts off the whole answer, since data.max_length = {limit}."
        )
        if all(without_answer):
            raise DataError([f"{summary} No row is left. Raise data.max_length."])
        logger.warning("%s These rows are left out; raise data.max_length to keep them.", summary)
        return [row for row, is_dropped in zip(encoded, without_answer, strict=True) if not is_dropped]

    def _log_sample(self) -> None:
        """Log the first row and its learned parts; warn if the loss includes no end token."""
        row = self._encoder.tokenize([self._render(0, self.rows[0])])[0][-1]
        text = self._encoder.describe(row)
        beginning = "" if len(text) <= _SAMPLE_CHARACTERS else "…"
        logger.info(
            "%s, with a loss on the text in ⟦ ⟧: %s%s", self.rows.where(0), beginning, text[-_SAMPLE_CHARACTERS:]
        )
        if not self._encoder.learns_end_token(row):
            logger.warning(
                "%s: the last answer has no end token, so the model will not learn to end its answers. Let the chat "
                "template write one after every answer (inside its generation block, if it has one).",
                self.rows.where(0),
            )

    def _check_lengths(self, lengths: np.ndarray, numbers: Sequence[int]) -> None:
        limit = self.config.max_length
        long = np.flatnonzero(lengths > limit)
        if len(long):
            raise DataError(
                [
                    f"{self.rows.where(numbers[long[0]])} (and {len(long) - 1} more): {lengths[long[0]]} tokens are "
                    f"more than data.max_length = {limit} (the longest row has {lengths.max()}). Raise it, or set "
                    "data.truncation=right or left."
                ]
            )


class MultiTurnSFTDataset(SFTDataset):
    """As SFTDataset, with a loss on every answer of a conversation instead of the last one."""

    last_turn_only: ClassVar[bool] = False
