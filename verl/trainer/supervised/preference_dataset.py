"""PreferenceDataset: prompts with pairs of chosen and rejected answers, for reward models."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.config.rm import RMDataConfig
from verl.utils.dataset.chat import Messages, as_messages, prompt_digest
from verl.utils.dataset.conversation import LOSS, ConversationEncoder, Pieces, ids_up_to_answer
from verl.utils.dataset.problems import DataError, RowRule, chat_problem, raise_missing_columns, raise_problems
from verl.utils.dataset.rows import Rows, bool_at, find_files, value_at
from verl.utils.dataset.tokens import TokenStore, truncate

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
# Token ids of a prompt with an answer, and the number of tokens of the answer.
Encoded = tuple[np.ndarray, int]


class PreferenceDataset(Dataset):
    """A row of the files compares two answers. An item is a prompt with the pairs of all its rows.

    `chosen` and `rejected` are texts or messages that follow `prompt`; messages that do not begin with an assistant
    message are complete conversations. As in generation, a conversation ends with the end token of its last answer,
    where its score is read. Optional columns: `preference` (probability that `chosen` is better) or `tie`, `margin`,
    `weight`.

    An item has `answers`, a list of int64 [tokens] including the prompt; `answer_tokens`, the number of tokens after
    the prompt; and `pairs` [pairs, 5]: indices of chosen and rejected in `answers`, preference, margin, weight. Answers
    with equal tokens are stored once.

    The constructor tokenises all rows, and raises DataError for a row that the chat template rejects.
    """

    read_in_thread = True
    """Items may be read in another thread (`BatchLoader`)."""

    def __init__(
        self,
        data_files: str | os.PathLike[str] | Sequence[str],
        tokenizer: Any,
        config: RMDataConfig,
        max_samples: int = -1,
        *,
        split: str | None = None,
    ) -> None:
        self.config = config
        self.rows = Rows(find_files(data_files, split))
        if split != "validation":
            raise_missing_columns(self.rows, config, ("preference_key", "tie_key", "margin_key", "weight_key"))
        raise_problems(self.rows, [RowRule(self._columns(), self._problem, lambda table: False)])
        self._encoder = ConversationEncoder(tokenizer, config.apply_chat_template_kwargs, last_turn_only=True)
        self._pairs = len(self.rows) if max_samples < 0 else min(max_samples, len(self.rows))
        self._equal_pairs: list[int] = []
        self._prompts = self._group_by_prompt()
        encoded = list(self._encode_all())
        if config.truncation == "error":
            self._check_lengths(np.array([len(ids) for ids, _ in encoded]))
        self._answer_tokens = [self._kept_answer(len(ids), tokens) for ids, tokens in encoded]
        self._ids = TokenStore.from_sequences(truncate(ids, config.max_length, config.truncation) for ids, _ in encoded)
        logger.info("%s: %d pairs of %d prompts", self.rows.data_files[0].file, self._pairs, len(self._prompts))
        if self._equal_pairs:
            others = f" (and {len(self._equal_pairs) - 1} more)" if len(self._equal_pairs) > 1 else ""
            logger.warning(
                "%s%s: both answers are equal; such a pair counts as half correct in val/accuracy. Remove such rows.",
                self.rows.where(self._equal_pairs[0]),
                others,
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, item: int) -> dict[str, Any]:
        indices: dict[tuple[int, ...], int] = {}
        lengths: list[int] = []
        pairs: list[tuple[float, ...]] = []
        for number in self._prompts[item]:
            compared = []
            for at in (2 * number, 2 * number + 1):
                compared.append(indices.setdefault(tuple(self._ids[at].tolist()), len(indices)))
                if len(indices) > len(lengths):
                    lengths.append(self._answer_tokens[at])
            pairs.append((*compared, *self._numbers(self.rows[number])))
        return {
            "answers": [torch.tensor(ids, dtype=torch.int64) for ids in indices],
            "answer_tokens": lengths,
            "pairs": torch.tensor(pairs, dtype=torch.float64),
        }

    def conversations(self, row: Row) -> tuple[Messages, Messages]:
        """Return the two conversations of a row, chosen and rejected. Raises ValueError for an invalid row."""
        config = self.config
        prompt = value_at(row, config.prompt_key)
        chosen, rejected = (
            _conversation(prompt, value_at(row, key), key, config.prompt_key)
            for key in (config.chosen_key, config.rejected_key)
        )
        return chosen, rejected

    # ---------------------------------------------------------------- rows

    def _columns(self) -> tuple[str, ...]:
        config = self.config
        keys = (config.prompt_key, config.chosen_key, config.rejected_key, config.preference_key, config.tie_key)
        return tuple(dict.fromkeys(key.split(".")[0] for key in (*keys, config.margin_key, config.weight_key)))

    def _problem(self, row: dict[str, Any], columns: Sequence[str]) -> str | None:
        try:
            self.conversations(row)
            self._numbers(row)
        except ValueError as error:
            return f"{error} (Columns: {', '.join(columns)}; the keys data.*_key select the columns.)"
        return None

    def _numbers(self, row: Row) -> tuple[float, float, float]:
        """Return preference, margin and weight of a row."""
        config = self.config
        tied = bool_at(row, config.tie_key)
        preference = _number(row, config.preference_key, 0.5 if tied else 1.0)
        if not 0 <= preference <= 1:
            raise ValueError(f"{config.preference_key!r} is {preference}: a probability is from 0 to 1. Correct it.")
        if tied and preference != 0.5:
            raise ValueError(f"{config.tie_key!r} is true, but {config.preference_key!r} is {preference}. Remove one.")
        weight = _number(row, config.weight_key, 1.0)
        if weight < 0:
            raise ValueError(f"{config.weight_key!r} is {weight}. Set it to 0 or more.")
        return preference, _number(row, config.margin_key, 0.0), weight

    def _read(self) -> Iterator[tuple[int, Sequence[Row]]]:
        """Yield batches of rows, with the number of their first row."""
        for first, rows in self.rows.batches(self._columns()):
            if first >= self._pairs:
                return
            yield first, rows[: self._pairs - first]

    def _group_by_prompt(self) -> list[list[int]]:
        """Group rows by prompt: the common beginning of their two conversations."""
        groups: dict[bytes, list[int]] = {}
        for number, row in ((first + at, row) for first, rows in self._read() for at, row in enumerate(rows)):
            chosen, rejected = self.conversations(row)
            if chosen == rejected:
                self._equal_pairs.append(number)
            common = next((at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), -1)
            groups.setdefault(prompt_digest(chosen[:common]), []).append(number)
        return list(groups.values())

    # ---------------------------------------------------------------- tokens

    def _encode_all(self) -> Iterator[Encoded]:
        """Yield chosen and rejected of every row, up to the end token of the last answer: text that a chat template
        writes after it does not occur in generation."""
        for first, rows in self._read():
            rendered = [answer for at, row in enumerate(rows) for answer in self._render(first + at, row)]
            for (row,) in self._encoder.tokenize(rendered):
                yield np.array(ids_up_to_answer(row), np.int32), sum(1 for weight in row.weights if weight)

    def _render(self, number: int, row: Row) -> list[list[Pieces]]:
        try:
            return [self._encoder.render(messages) for messages in self.conversations(row)]
        except ValueError as error:
            raise DataError([f"{self.rows.where(number)}: {error}"]) from error

    def _kept_answer(self, length: int, tokens: int) -> int:
        """Return how many of an answer's tokens, the last `tokens` of `length`, remain after truncation."""
        is_answer = np.arange(length) >= length - tokens
        return int(truncate(is_answer, self.config.max_length, self.config.truncation).sum())

    def _check_lengths(self, lengths: np.ndarray) -> None:
        limit = self.config.max_length
        long = np.flatnonzero(lengths > limit)
        if len(long):
            where = self.rows.where(int(long[0]) // 2)
            raise DataError(
                [
                    f"{where}: {lengths[long[0]]} tokens are more than data.max_length = {limit} ({len(long)} answers"
                    f" of {len(lengths)} are; the longest has {lengths.max()}). Raise it, or set data.truncation=left,"
                    " which keeps the answer's end."
                ]
            )


def _conversation(prompt: Any, answer: Any, key: str, prompt_key: str) -> Messages:
    if answer is None:
        raise ValueError(f"it has no {key!r}. Fill it, or remove the row.")
    problem = None if isinstance(answer, str) else chat_problem(key, answer)  # an empty answer is valid
    if problem is not None:
        raise ValueError(problem)
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else as_messages(answer)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"the last message of {key!r} is the {messages[-1]['role']}'s. Let it be the assistant's.")
    if messages[0]["role"] != "assistant":
        return _without_weights(messages)
    problem = f"it has no {prompt_key!r}. Add it." if prompt is None else chat_problem(prompt_key, prompt)
    if problem is not None:
        raise ValueError(problem)
    return _without_weights([*as_messages(prompt), *messages])


def _without_weights(messages: Messages) -> Messages:
    """Remove the loss weights of supervised fine-tuning, which do not apply to scoring."""
    return [{name: value for name, value in message.items() if name != LOSS} for message in messages]


def _number(row: Row, key: str, default: float) -> float:
    value = value_at(row, key)
    if value is None:
        return default
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key!r} is {value!r}, not a number. Correct it.")
    return float(value)
