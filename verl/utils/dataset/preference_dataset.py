"""PreferenceDataset: prompts with answers that were compared, each answer once however many pairs it is in."""

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
from verl.utils.dataset.conversation import LOSS, ConversationEncoder, Pieces, up_to_answer
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import DataError, Rule, chat_problem, refuse_missing_columns, refuse_problems
from verl.utils.dataset.rows import Rows, switch_at, value_at
from verl.utils.dataset.tokens import TokenStore, truncated

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
# An answer with its prompt in tokens, and how many of them are the answer's.
Encoded = tuple[np.ndarray, int]


class PreferenceDataset(Dataset):
    """Rows of files that compare two answers; an item is a prompt with the pairs of all its rows.

    `chosen` and `rejected` are texts or messages that follow `prompt`; messages that do not begin with the assistant's
    are whole conversations. A conversation ends with the end token of its last answer, as in generation: its score is
    read there. Optional columns: `preference` (the probability that `chosen` is better) or `tie`, `margin`, `weight`.

    An item holds `answers`, a list of int64 [tokens]; `answer_tokens`, how many of these are not the prompt's; and
    `pairs` [pairs, 5]: places of chosen and rejected among the answers, preference, margin, weight. Answers of the same
    tokens are one.

    All rows are tokenised now: one that the chat template refuses is no surprise later.
    """

    read_in_thread = True
    """Rows may be read by another thread than the one that made it (`BatchLoader`)."""

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
            refuse_missing_columns(self.rows, config, ("preference_key", "tie_key", "margin_key", "weight_key"))
        refuse_problems(self.rows, [Rule(self._columns(), self._problem, lambda table: False)])
        self._encoder = ConversationEncoder(tokenizer, config.apply_chat_template_kwargs, last_turn_only=True)
        self._pairs = len(self.rows) if max_samples < 0 else min(max_samples, len(self.rows))
        self._equal: list[int] = []
        self._prompts = self._rows_of_prompts()
        encoded = list(self._encode_all())
        if config.truncation == "error":
            self._refuse_overlong(np.array([len(ids) for ids, _ in encoded]))
        self._answer_tokens = [self._kept_answer(len(ids), tokens) for ids, tokens in encoded]
        self._ids = TokenStore.of(truncated(ids, config.max_length, config.truncation) for ids, _ in encoded)
        logger.info("%s: %d pairs of %d prompts", self.rows.parts[0].file, self._pairs, len(self._prompts))
        if self._equal:
            logger.warning(
                "%s (and %d more rows): both answers are the same, so there is nothing to tell apart, and "
                "the pair is half right in val/accuracy. Remove such rows.",
                self.rows.where(self._equal[0]),
                len(self._equal) - 1,
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, item: int) -> dict[str, Any]:
        places: dict[tuple[int, ...], int] = {}
        lengths: list[int] = []
        pairs: list[tuple[float, ...]] = []
        for number in self._prompts[item]:
            compared = []
            for at in (2 * number, 2 * number + 1):
                compared.append(places.setdefault(tuple(self._ids[at].tolist()), len(places)))
                if len(places) > len(lengths):
                    lengths.append(self._answer_tokens[at])
            pairs.append((*compared, *self._numbers(self.rows[number])))
        return {
            "answers": [torch.tensor(ids, dtype=torch.int64) for ids in places],
            "answer_tokens": lengths,
            "pairs": torch.tensor(pairs, dtype=torch.float64),
        }

    def conversations(self, row: Row) -> tuple[Messages, Messages]:
        """Both answers of a row of the file with what is said before them. ValueError for a row that cannot be used."""
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
            return f"{error} (Columns: {', '.join(columns)}; data.*_key name those that are read.)"
        return None

    def _numbers(self, row: Row) -> tuple[float, float, float]:
        """Preference, margin and weight of a row."""
        config = self.config
        tied = switch_at(row, config.tie_key)
        preference = _number(row, config.preference_key, 0.5 if tied else 1.0)
        if not 0 <= preference <= 1:
            raise ValueError(f"{config.preference_key!r} is {preference}: a probability is from 0 to 1. Correct it.")
        if tied and preference != 0.5:
            raise ValueError(f"{config.tie_key!r} is true, but {config.preference_key!r} {preference}. Leave one out.")
        weight = _number(row, config.weight_key, 1.0)
        if weight < 0:
            raise ValueError(f"{config.weight_key!r} is {weight}. Set it to 0 or more.")
        return preference, _number(row, config.margin_key, 0.0), weight

    def _read(self) -> Iterator[tuple[int, Sequence[Row]]]:
        """The number of a row, and those from it on that are read together."""
        for first, rows in self.rows.batches(self._columns()):
            if first >= self._pairs:
                return
            yield first, rows[: self._pairs - first]

    def _rows_of_prompts(self) -> list[list[int]]:
        """Rows whose two conversations begin alike, up to where they part, ask the same."""
        found: dict[bytes, list[int]] = {}
        for number, row in ((first + at, row) for first, rows in self._read() for at, row in enumerate(rows)):
            chosen, rejected = self.conversations(row)
            if chosen == rejected:
                self._equal.append(number)
            same = next((at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), -1)
            found.setdefault(prompt_digest(chosen[:same]), []).append(number)
        return list(found.values())

    # ---------------------------------------------------------------- tokens

    def _encode_all(self) -> Iterator[Encoded]:
        """Chosen and rejected of every row. Each ends with the end token of its last answer: what a template writes
        after it, generation never sees."""
        for first, rows in self._read():
            written = [answer for at, row in enumerate(rows) for answer in self._written(first + at, row)]
            for (row,) in self._encoder.encoded(written):
                yield np.array(up_to_answer(row), np.int32), sum(1 for weight in row.weights if weight)

    def _written(self, number: int, row: Row) -> list[list[Pieces]]:
        try:
            return [self._encoder.written(messages) for messages in self.conversations(row)]
        except ValueError as error:
            raise DataError([f"{self.rows.where(number)}: {error}"]) from error

    def _kept_answer(self, length: int, tokens: int) -> int:
        """How many tokens of an answer, the last ones of so many, are left after truncation."""
        marks = np.arange(length) >= length - tokens
        return int(truncated(marks, self.config.max_length, self.config.truncation).sum())

    def _refuse_overlong(self, lengths: np.ndarray) -> None:
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
    problem = None if isinstance(answer, str) else chat_problem(key, answer)  # to say nothing is an answer, too
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
    """What each message counts in supervised fine-tuning says nothing of where a conversation is scored."""
    return [{name: value for name, value in message.items() if name != LOSS} for message in messages]


def _number(row: Row, key: str, default: float) -> float:
    value = value_at(row, key)
    if value is None:
        return default
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key!r} is {value!r}, not a number. Correct it.")
    return float(value)
