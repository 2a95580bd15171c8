"""RLHFDataset: prompts from files as left-padded token rows, with everything the reward needs beside them."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import Dataset

from verl.config.data import DataConfig
from verl.config.load import as_config
from verl.types.schema import RESERVED
from verl.utils.dataset.chat import ChatTemplate, PromptEncoder
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import (
    DataError,
    Rule,
    chat_rule,
    ground_truth_of,
    refuse_problems,
    rl_rules,
)
from verl.utils.dataset.prompt_tokens import encode_prompts
from verl.utils.dataset.rows import Rows, value_at
from verl.utils.dataset.tokens import left_padded, truncated
from verl.utils.model import compute_position_id_with_mask
from verl.utils.nested import object_array
from verl.utils.reward_score.registry import UNKNOWN_SOURCE

logger = logging.getLogger(__name__)


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Rows to columns: tensors are stacked, everything else becomes object arrays."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for row in data_list:
        for name, value in row.items():
            columns[name].append(value)
    uneven = sorted(name for name, values in columns.items() if len(values) != len(data_list))
    if uneven:
        raise ValueError(f"collate_fn: only some rows have {', '.join(uneven)}. Give every row the same fields.")
    return {
        name: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)
        for name, values in columns.items()
    }


class RLHFDataset(Dataset):
    """Prompts of the given files (paths, folders, hub names; parquet, arrow, json, jsonl).

    A row is a dict: `input_ids`, `attention_mask`, `position_ids` [max_prompt_length], left-padded; every column of the
    file but the prompt (`data_source`, `reward_model`, `ability`, …); `extra_info`, `index`, `uid`; `raw_prompt` (the
    messages) with `data.return_raw_chat`. Row order is file order. `uid` depends on the prompt's words and on how many
    earlier rows say the same: it survives filtering, a resume, files moved or in another order, and another number of
    processes. A column of the file with a name that is ours (`uid`, `responses`, …) is `data_<name>` in the row.

    Problems with prompts raise a DataError here; `validate` also checks what the reward needs. All prompts are
    tokenised now, once: a later start on the same files maps the result. `chat_template_func` maps messages to the
    prompt's text (or token ids) in place of the tokenizer's template. `split` chooses among the splits of a folder.
    """

    def __init__(
        self,
        data_files: str | os.PathLike[str] | Sequence[str],
        tokenizer: Any,
        config: DataConfig | DictConfig | Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
        *,
        chat_template_func: ChatTemplate | None = None,
        split: str | None = None,
    ) -> None:
        self.config = as_config(DataConfig, config)
        self.tokenizer = tokenizer
        self.processor = processor
        self.rows = Rows(find_files(data_files, split))
        refuse_problems(self.rows, [self._prompt_rule()])
        self._names = self._names_in_batch()
        self._encoder = PromptEncoder(
            tokenizer, self.config.apply_chat_template_kwargs, chat_template_func, self.config.system_prompt
        )
        count = len(self.rows) if max_samples < 0 else min(max_samples, len(self.rows))
        self._prompts = encode_prompts(self.rows, count, self.config.prompt_key, self._encoder)
        self._kept = np.arange(count)
        if self.config.filter_overlong_prompts or self.config.truncation == "error":
            self._drop_or_refuse_overlong(self._prompts.tokens.lengths)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, item: int) -> dict[str, Any]:
        number = int(self._kept[item])
        width = self.config.max_prompt_length
        ids = truncated(self._prompts.tokens[number], width, self.config.truncation)
        input_ids, mask = left_padded(ids, width, self.tokenizer.pad_token_id)
        inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": compute_position_id_with_mask(mask)}
        return {**inputs, **self._fields(self.rows[number], number)}

    def column(self, name: str) -> list[Any]:
        """One column of the files over the rows of this dataset, in order; None where a row has none."""
        values = [row.get(name) for _, rows in self.rows.batches([name]) for row in rows]
        return [values[number] for number in self._kept.tolist()]

    def uids(self) -> list[str]:
        """The `uid` of every row, in order; for samplers that remember rows."""
        return [self._prompts.uid(number) for number in self._kept.tolist()]

    def validate(self, data_sources: Collection[str] | None = None, ground_truth: bool = True) -> None:
        """Raise a DataError with everything that would stop scoring: a missing or wrong field, an unknown source.

        `data_sources`: those with a reward function; None: not checked, since a function of the user takes any.
        `ground_truth`: whether rows need a right answer to compare with. Rows whose `agent_name` is an agent loop of
        the user need neither: it may return the score.
        """
        refuse_problems(self.rows, rl_rules(self.config, data_sources, ground_truth))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps to know the data again; the position is the sampler's."""
        return {"fingerprint": self._prompts.fingerprint(self._kept), "prompts": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse to resume on other data: the saved position would mean other prompts."""
        mine = self.state_dict()
        if dict(state) != mine:
            files = ", ".join(part.file for part in self.rows.parts)
            raise ValueError(
                f"data.train_files: not the prompts of the checkpoint, or in another order ({files}: {mine['prompts']} "
                f"here, {state['prompts']} there). Give the same files and limits, or begin anew in another folder."
            )

    def _names_in_batch(self) -> dict[str, str]:
        """Column of the files → field of a row, for all but the prompt: its own name, or `data_…` for one of ours."""
        columns = [name for name in self.rows.columns if name != self.config.prompt_key]
        taken, names = {*columns, *RESERVED}, {}
        for column in columns:
            names[column] = name = column
            while column in RESERVED and name in taken:
                names[column] = name = f"data_{name}"
            if column != name:
                taken.add(name)
                logger.warning(
                    "%s: the column %r is %r in a batch, where %r is a name of the trainer's own",
                    self.rows.parts[0].file, column, name, column,
                )  # fmt: skip
        if self.config.reward_fn_key in RESERVED:
            raise DataError(
                [
                    f"data.reward_fn_key: {self.config.reward_fn_key!r} is a name of the trainer's own in every batch."
                    " Give the column that names the reward function another one."
                ]
            )
        return names

    def _prompt_rule(self) -> Rule:
        return chat_rule(self.config.prompt_key, "data.prompt_key")

    def _drop_or_refuse_overlong(self, lengths: np.ndarray) -> None:
        limit = self.config.max_prompt_length
        long = np.flatnonzero(lengths > limit)
        if not len(long):
            return
        if not self.config.filter_overlong_prompts:
            raise DataError(
                [
                    f"{self.rows.where(int(long[0]))} (and {len(long) - 1} more): the prompt has {lengths[long[0]]} "
                    f"tokens, more than data.max_prompt_length = {limit} (the longest has {lengths.max()}). Raise it, "
                    "set data.filter_overlong_prompts=True, or data.truncation=left, right or middle."
                ]
            )
        self._kept = np.flatnonzero(lengths <= limit)
        logger.info(
            "%d of %d prompts have more than data.max_prompt_length = %d tokens and are left out",
            len(long), len(lengths), limit,
        )  # fmt: skip
        if not len(self._kept):
            raise DataError(
                [
                    f"{self.rows.parts[0].file}: all {len(lengths)} prompts have more than data.max_prompt_length = "
                    f"{limit} tokens (the shortest has {lengths.min()}). Raise it."
                ]
            )

    def _fields(self, row: dict[str, Any], number: int) -> dict[str, Any]:
        """Every column of any file, so that all rows have the same fields, and those we add."""
        key = self.config.prompt_key
        fields = {name: row.get(column) for column, name in self._names.items()}
        answer = ground_truth_of(row, self.config.ground_truth_key)
        if answer is not None or "reward_model" in fields:
            fields["reward_model"] = {"style": "rule", **(fields.get("reward_model") or {}), "ground_truth": answer}
        source_key = self.config.reward_fn_key
        if fields.get(source_key) is None:
            source = value_at(row, source_key)
            fields[source_key] = UNKNOWN_SOURCE if source is None else source
        extra = fields.get("extra_info") or {}
        fields["extra_info"] = extra
        fields["index"] = number if extra.get("index") is None else extra["index"]
        fields["uid"] = self._prompts.uid(number)
        if self.config.return_raw_chat:
            fields["raw_prompt"] = self._encoder.messages(value_at(row, key))
        return fields


RLDataset = RLHFDataset
