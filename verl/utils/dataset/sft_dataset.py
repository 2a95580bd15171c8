"""SFTDataset: questions with answers, or conversations, as rows whose loss falls on the answer only."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.utils.dataset.chat import Messages, as_messages
from verl.utils.dataset.conversation import ConversationEncoder, LearnedRow, Pieces
from verl.utils.dataset.conversation_tools import as_tools
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import DataError, Rule, refuse_missing_columns, refuse_problems, sft_rules
from verl.utils.dataset.rows import Rows, switch_at, value_at
from verl.utils.dataset.tokens import WEIGHTS, TokenStore, truncated

logger = logging.getLogger(__name__)

_SHOWN = 1200  # characters of a sample in the log

# The row of the file, token ids and how much each counts.
Encoded = tuple[int, np.ndarray, np.ndarray]


@dataclass(kw_only=True)
class SFTDataConfig:
    """Which columns hold what, and how long a row may be. A key with dots looks inside: `extra_info.question`."""

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
    def of(cls, config: Any) -> SFTDataConfig:
        """Ours as it is; of any other object or mapping, the keys we know."""
        if isinstance(config, cls):
            return config
        known = [item.name for item in fields(cls)]
        return cls(**{name: config[name] for name in known if config is not None and name in config})


class SFTDataset(Dataset):
    """Rows of files as token sequences.

    Where a file has the column `messages_key`, a row is that conversation (with the tools of `tools_key`) and the loss
    falls on its last answer, or by the `loss` of each message; else the prompt (text or messages) is followed by the
    response. A row is a dict of [its own length] tensors: `input_ids`, `attention_mask`, `position_ids`, and
    `loss_mask`, which is 1 on answer tokens (the end token included), or their weight: the loss of a token is that of
    predicting it. A conversation is several rows where the chat template rewrites its earlier turns.

    All rows are tokenised now: one that the chat template refuses is no surprise later. A row of which truncation
    would leave nothing to learn is left out, and told.
    """

    read_in_thread = True
    """Rows may be read by another thread than the one that made it (`BatchLoader`)."""

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
        if split != "validation":
            refuse_missing_columns(self.rows, self.config, ("messages_key", "tools_key", "enable_thinking_key"))
        self._from_messages = self.config.messages_key in self.rows.columns
        refuse_problems(self.rows, self._rules())
        splits = self.config.rewritten_turns == "split"
        self._encoder = ConversationEncoder(
            tokenizer, self.config.apply_chat_template_kwargs, self.last_turn_only, splits
        )
        self._conversations = len(self.rows) if max_samples < 0 else min(max_samples, len(self.rows))
        self._ids, self._weights = self._store()
        if self._conversations:
            self._tell_sample()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        limit, how = self.config.max_length, self.config.truncation
        ids, weights = (truncated(store[item], limit, how) for store in (self._ids, self._weights))
        kind = torch.int64 if np.isin(weights, (0, 1)).all() else torch.float32
        return {
            "input_ids": torch.tensor(ids, dtype=torch.int64),
            "attention_mask": torch.ones(len(ids), dtype=torch.int64),
            "position_ids": torch.arange(len(ids)),
            "loss_mask": torch.tensor(weights, dtype=kind),
        }

    def messages_of(self, row: Mapping[str, Any]) -> Messages:
        """The conversation of a row of the file; the loss falls on the assistant's part of it."""
        if self._from_messages:
            key = self.config.messages_key
            if isinstance(row[key], str):
                raise ValueError(f"{key!r} is a text. Write it as a list of {{role, content}}.")
            return as_messages(row[key])
        prompt, response = value_at(row, self.config.prompt_key), value_at(row, self.config.response_key)
        return [*as_messages(prompt), {"role": "assistant", "content": response}]

    def _rules(self) -> list[Rule]:
        """The columns are there and hold what they should, whichever of the two forms the file has."""
        return sft_rules(self.config, self.rows.columns)

    def _written(self, number: int, row: Mapping[str, Any]) -> list[Pieces]:
        config = self.config
        try:
            tools = as_tools(value_at(row, config.tools_key), config.tools_key)
            thinking = switch_at(row, config.enable_thinking_key)
            kwargs = {} if thinking is None else {"enable_thinking": thinking}
            return self._encoder.written(self.messages_of(row), tools, **kwargs)
        except ValueError as error:
            raise DataError([f"{self.rows.where(number)}: {error}"]) from error

    def _encode_all(self) -> Iterator[tuple[int, LearnedRow]]:
        config = self.config
        keys = (config.messages_key, config.prompt_key, config.response_key, config.tools_key)
        columns = [key.split(".")[0] for key in (*keys, config.enable_thinking_key)]
        for first, rows in self.rows.batches(columns):
            if first >= self._conversations:
                return
            written = [self._written(first + at, row) for at, row in enumerate(rows[: self._conversations - first])]
            for number, made in enumerate(self._encoder.encoded(written), start=first):
                yield from ((number, row) for row in made)

    def _store(self) -> tuple[TokenStore, TokenStore]:
        """Tokenise everything; several rows of a conversation stand one after the other."""
        encoded = [
            (number, np.array(row.ids, np.int32), np.array(row.weights, np.float32))
            for number, row in self._encode_all()
        ]
        if len(encoded) > self._conversations:
            logger.info(
                "%d conversations are %d rows: earlier turns are written anew when later ones come, so "
                "each text is learned from by itself (data.rewritten_turns)",
                self._conversations,
                len(encoded),
            )
        if self.config.truncation == "error":
            self._refuse_overlong(np.array([len(ids) for _, ids, _ in encoded]), [number for number, _, _ in encoded])
        else:
            encoded = self._with_something_to_learn(encoded)
        return (
            TokenStore.of(ids for _, ids, _ in encoded),
            TokenStore.of((weights for _, _, weights in encoded), WEIGHTS),
        )

    def _with_something_to_learn(self, encoded: list[Encoded]) -> list[Encoded]:
        """Without rows whose answers `truncation` cuts off whole: they would only take the place of others."""
        limit, how = self.config.max_length, self.config.truncation
        lost = [not truncated(weights, limit, how).any() for _, _, weights in encoded]
        if not any(lost):
            return encoded
        said = (
            f"{self.rows.where(encoded[lost.index(True)][0])} (and {sum(lost) - 1} more of {len(encoded)}): "
            f"data.truncation={how} cuts off all that is to be learned, since data.max_length = {limit}."
        )
        if all(lost):
            raise DataError([f"{said} No row is left. Raise it."])
        logger.warning("%s These rows are left out; raise it to keep them.", said)
        return [each for each, gone in zip(encoded, lost, strict=True) if not gone]

    def _tell_sample(self) -> None:
        """What is learned of the first row, in the log; a model that is not taught where to end is worth a warning."""
        row = self._encoder.encoded([self._written(0, self.rows[0])])[0][-1]
        text = self._encoder.shown(row)
        beginning = "" if len(text) <= _SHOWN else "…"
        logger.info("%s, learned is what stands in ⟦ ⟧: %s%s", self.rows.where(0), beginning, text[-_SHOWN:])
        if not self._encoder.ends(row):
            logger.warning(
                "%s: the last answer is learned without an end token: the model will not know where to end. Let the "
                "chat template write one after every answer (inside its generation block, if it has one).",
                self.rows.where(0),
            )

    def _refuse_overlong(self, lengths: np.ndarray, numbers: Sequence[int]) -> None:
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
