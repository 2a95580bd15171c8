"""The prompts of RL: RLHFDataset, left-padded token rows with the columns that rewards need; samplers of its rows."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import Dataset, Sampler

from verl.config.load import as_config
from verl.config.ppo import DataConfig
from verl.types.schema import RESERVED
from verl.utils.dataset.chat import ChatTemplate, PromptEncoder
from verl.utils.dataset.problems import DataError, chat_rule, raise_problems, rl_rules
from verl.utils.dataset.rows import Rows, find_files, ground_truth_of, value_at
from verl.utils.dataset.tokens import encode_prompts, pad_left, truncate
from verl.utils.model import compute_position_id_with_mask
from verl.utils.nested import object_array
from verl.utils.reward_score.registry import UNKNOWN_SOURCE

logger = logging.getLogger(__name__)


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Convert rows to columns: tensors are stacked, other values become object arrays."""
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

    An item is a dict: `input_ids`, `attention_mask`, `position_ids` [max_prompt_length], left-padded; every column of
    the file except the prompt (`data_source`, `reward_model`, `ability`, …); `extra_info`, `index`, `uid`; `raw_prompt`
    (the messages) with `data.return_raw_chat`. Items are in file order. `uid` depends on the messages of the prompt and
    on the number of earlier rows with the same ones: it is not changed by filtering, a resume, moved or reordered
    files, or another number of processes. A column with a reserved name (`uid`, `responses`, …) is renamed to
    `data_<name>`.

    Problems with prompts raise a DataError in the constructor; `validate` also checks the columns that rewards need.
    All prompts are tokenised once: a later start on the same files maps the result. `chat_template_func` maps messages
    to the prompt's text (or token ids) instead of the tokenizer's template. `split` selects a split of a folder.
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
        raise_problems(self.rows, [chat_rule(self.config.prompt_key, "data.prompt_key")])
        self._names = self._field_names()
        self._encoder = PromptEncoder(
            tokenizer, self.config.apply_chat_template_kwargs, chat_template_func, self.config.system_prompt
        )
        count = len(self.rows) if max_samples < 0 else min(max_samples, len(self.rows))
        self._prompts = encode_prompts(self.rows, count, self.config.prompt_key, self._encoder)
        self._kept = np.arange(count)
        if self.config.filter_overlong_prompts or self.config.truncation == "error":
            self._drop_or_reject_overlong(self._prompts.tokens.lengths)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, item: int) -> dict[str, Any]:
        number = int(self._kept[item])
        width = self.config.max_prompt_length
        ids = truncate(self._prompts.tokens[number], width, self.config.truncation)
        input_ids, mask = pad_left(ids, width, self.tokenizer.pad_token_id)
        inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": compute_position_id_with_mask(mask)}
        return {**inputs, **self._fields(self.rows[number], number)}

    def column(self, name: str) -> list[Any]:
        """Return one column of the files for the rows of this dataset, in order; None for rows without it."""
        values = [row.get(name) for _, rows in self.rows.batches([name]) for row in rows]
        return [values[number] for number in self._kept.tolist()]

    def uids(self) -> list[str]:
        """Return the `uid` of every row, in order; for samplers that remember rows."""
        return [self._prompts.uid(number) for number in self._kept.tolist()]

    def validate(self, data_sources: Collection[str] | None = None, ground_truth: bool = True) -> None:
        """Raise a DataError with all problems that would prevent scoring: missing or invalid fields, unknown sources.

        `data_sources`: those with a reward function; None: not checked, since a user's function accepts any.
        `ground_truth`: whether rows need one. Rows whose `agent_name` is a user's agent loop need neither: the loop may
        return the score.
        """
        raise_problems(self.rows, rl_rules(self.config, data_sources, ground_truth))

    def state_dict(self) -> dict[str, Any]:
        """Return what identifies the data in a checkpoint; the position is the sampler's."""
        return {"fingerprint": self._prompts.fingerprint(self._kept), "prompts": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for other data: the saved position would refer to other prompts."""
        current = self.state_dict()
        if dict(state) != current:
            files = ", ".join(data_file.file for data_file in self.rows.data_files)
            raise ValueError(
                f"data.train_files: not the prompts of the checkpoint, or in another order ({files}:"
                f" {current['prompts']} here, {state['prompts']} there). Use the same files and limits, or start from"
                " scratch in another folder."
            )

    def _field_names(self) -> dict[str, str]:
        """Column of the files → field of an item, without the prompt: its own name, or `data_…` for reserved names."""
        columns = [name for name in self.rows.columns if name != self.config.prompt_key]
        taken, names = {*columns, *RESERVED}, {}
        for column in columns:
            names[column] = name = column
            while column in RESERVED and name in taken:
                names[column] = name = f"data_{name}"
            if column != name:
                taken.add(name)
                logger.warning(
                    "%s: the column %r is named %r in batches, since %r is a reserved name",
                    self.rows.data_files[0].file, column, name, column,
                )  # fmt: skip
        if self.config.reward_fn_key in RESERVED:
            raise DataError(
                [
                    f"data.reward_fn_key: {self.config.reward_fn_key!r} is a reserved name. Rename the column that"
                    " names the reward function."
                ]
            )
        return names

    def _drop_or_reject_overlong(self, lengths: np.ndarray) -> None:
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
                    f"{self.rows.data_files[0].file}: all {len(lengths)} prompts have more than data.max_prompt_length"
                    f" = {limit} tokens (the shortest has {lengths.min()}). Raise it."
                ]
            )

    def _fields(self, row: dict[str, Any], number: int) -> dict[str, Any]:
        """The columns of all files, so that all items have the same fields, and the added fields."""
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
            fields["raw_prompt"] = self._encoder.messages(value_at(row, self.config.prompt_key))
        return fields


RLDataset = RLHFDataset


class AbstractSampler(Sampler[int], ABC):
    """Base of the class in `data.sampler.{path,name}`: iterates over row numbers of `data_source`.

    With `state_dict` and `load_state_dict` its position is saved and restored with the run.
    """

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that adapts to responses: `update` gets every trained batch, with scores and advantages.

    With `algorithm.filter_groups` it gets every generated batch instead, with scores and before advantages are
    computed: groups that are dropped because all scores are equal are informative for the sampler too.
    """

    @abstractmethod
    def update(self, batch: Any) -> None: ...


class EpochSampler(Sampler[int]):
    """Every row once per epoch, in an order that depends on (seed, epoch) only; or in file order.

    An epoch has only full batches of `batch_size` rows. In file order, the next epoch starts with the rows at the end
    that did not fill a batch and wraps around; shuffled, an epoch leaves out random rows. Iterating once is one epoch;
    after `load_state_dict` the interrupted epoch continues with its next row.
    """

    def __init__(self, data_source: Sized, seed: int, shuffle: bool = True, batch_size: int = 1) -> None:
        self._rows = len(data_source)
        self._seed = seed
        self._shuffle = shuffle
        self._length = self._rows // batch_size * batch_size
        self._epoch = 0
        self._done = 0
        self._first = 0  # in file order: the first row of the epoch
        self._resumed = True  # the next iteration continues this epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        if not self._resumed or self._done >= self._length:
            self._epoch, self._done = self._epoch + 1, 0
            self._first = (self._first + self._length) % self._rows
        self._resumed = False
        for row in self._order()[self._done : self._length]:
            self._done += 1
            yield row

    def state_dict(self) -> dict[str, int]:
        position = {"epoch": self._epoch, "first": self._first, "done": self._done}
        return {**position, "seed": self._seed, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if (state["seed"], state["rows"]) != (self._seed, self._rows):
            raise ValueError(
                f"data.seed: the checkpoint was saved with seed {state['seed']} and {state['rows']} rows, this run has "
                f"seed {self._seed} and {self._rows}. Restore them, or start from scratch in another folder."
            )
        self._epoch, self._done, self._resumed = state["epoch"], state["done"], True
        self._first = state.get("first", 0)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return [*range(self._first, self._rows), *range(self._first)]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(self._rows, generator=generator).tolist()
