"""Input of a generation: prompt rows, sampling parameters, end tokens, and the jobs and tasks made from them."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from verl.config import RolloutConfig
from verl.config.rollout import GeneratorConfig
from verl.models.loading import read_config
from verl.protocol import DataProto, object_array
from verl.types.request import Output, Request, SamplingParams
from verl.types.trajectory import Row, Trajectory
from verl.utils.counter_noise import sample_key
from verl.utils.dataset.tokens import pad_left
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path
from verl.workers.rollout.training_rows import rows_from_trajectories

logger = logging.getLogger(__name__)

_SERIAL = itertools.count()
# Other names of sampling parameters: of `generate_sequences`, and of agents' requests.
_ALIASES = {
    "response_length": "max_new_tokens",
    "eos_token_id": "eos_token_ids",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
_SETTABLE = {field.name for field in fields(SamplingParams)} - {"key"}
_FROM_CONFIG = _SETTABLE & {field.name for field in fields(RolloutConfig)}


def sampling_params(
    config: RolloutConfig, meta_info: Mapping[str, Any], default_eos: Iterable[int] = (), **overrides: Any
) -> SamplingParams:
    """Sampling parameters of a generation. In order of increasing precedence: the configuration (with `val_kwargs` if
    `meta_info["validate"]`), `meta_info`, `overrides`. ValueError for an unknown override."""
    values: dict[str, Any] = {name: config[name] for name in _FROM_CONFIG} | {"eos_token_ids": default_eos}
    if meta_info.get("validate"):
        values |= {name: config.val_kwargs[name] for name in config.val_kwargs if name != "n"}
    if meta_info.get("eos_token_id") is not None:
        values["eos_token_ids"] = meta_info["eos_token_id"]
    values |= {name: meta_info[name] for name in _SETTABLE if meta_info.get(name) is not None}
    return SamplingParams(**parse_sampling_params("generate_sequences", {**values, **overrides}))


def response_end_tokens(
    model: Any, rollout: GeneratorConfig, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> list[int]:
    """The token ids that end a response, for `meta_info["eos_token_id"]`; also logs them. `model`: configuration block
    of the model."""
    folder = resolve_model_path(model.path)
    hf_config = read_config(folder, model.trust_remote_code, model.override_config)
    end_tokens = find_end_tokens(folder, hf_config, tokenizer, template_kwargs, rollout.stop_token_ids)
    logger.info(end_tokens.describe(tokenizer, rollout.ignore_eos))
    return sorted(end_tokens.ids)


def parse_sampling_params(
    method: str, values: Mapping[str, Any], ignored: Collection[str] = frozenset()
) -> dict[str, Any]:
    """`values` with the names and types of the fields of `SamplingParams`; `ignored` names are left out. ValueError,
    which names `method`, for an unknown parameter."""
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        parameter = _ALIASES.get(name, name)
        if parameter in _SETTABLE:
            parsed[parameter] = _PARSERS[parameter](value) if parameter in _PARSERS else value
        elif parameter not in ignored:
            raise ValueError(f"{method}: unknown sampling parameter {name!r}. Use one of {sorted(_SETTABLE)}.")
    return parsed


def _parse_token_ids(value: int | Iterable[int] | None) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else (int(token) for token in value or ()))


def _parse_texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _parse_biases(value: Mapping[Any, float] | Iterable[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    return tuple((int(token), float(bias)) for token, bias in pairs)


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "eos_token_ids": _parse_token_ids,
    "stop_token_ids": _parse_token_ids,
    "stop": _parse_texts,
    "logit_bias": _parse_biases,
}


def prompt_rows(
    prompts: Sequence[np.ndarray], uids: Sequence[str], n: int, meta_info: dict[str, Any] | None = None
) -> DataProto:
    """`n` rows per prompt, left-padded to the longest; `uid` and `sample_index` (0 to n - 1) name them.

    `prompts`: token ids; `uids`: one per prompt, all different.
    """
    width = max(map(len, prompts))
    padded = [pad_left(ids, width, 0) for ids in prompts]
    return DataProto.from_dict(
        {
            "input_ids": torch.stack([ids for ids, _ in padded]).repeat_interleave(n, 0),
            "attention_mask": torch.stack([mask for _, mask in padded]).repeat_interleave(n, 0),
        },
        {
            "uid": object_array([uid for uid in uids for _ in range(n)]),
            "sample_index": object_array([*range(n)] * len(uids)),
        },
        meta_info,
        auto_padding=True,
    )


def trajectories_from_prompts(prompts: DataProto) -> list[Trajectory]:
    """One trajectory per row, with its prompt and without turns.

    Without a column `sample_index`, the rows of a uid are numbered in order; without `uid`, it is a hash of the
    prompt's tokens.
    """
    masks = prompts.batch["attention_mask"].cpu().numpy() != 0
    tokens = [ids[mask] for ids, mask in zip(prompts.batch["input_ids"].cpu().numpy(), masks, strict=True)]
    columns = prompts.non_tensor_batch
    uids = [str(uid) for uid in columns["uid"]] if "uid" in columns else [_prompt_hash(ids) for ids in tokens]
    numbers = columns["sample_index"] if "sample_index" in columns else _count_earlier_equal(uids)
    return [
        Trajectory(uid, int(number), [Row(ids, [])]) for uid, number, ids in zip(uids, numbers, tokens, strict=True)
    ]


def with_row_names(prompts: DataProto) -> DataProto:
    """The rows with the columns `uid` and `sample_index`, added as in `trajectories_from_prompts` if one is missing."""
    if {"uid", "sample_index"} <= prompts.non_tensor_batch.keys():
        return prompts
    named, trajectories = prompts.select(), trajectories_from_prompts(prompts)
    named.non_tensor_batch["uid"] = object_array([trajectory.uid for trajectory in trajectories])
    named.non_tensor_batch["sample_index"] = object_array([trajectory.sample_index for trajectory in trajectories])
    return named


def new_request_id(name: str) -> str:
    """A request id that is unique in this process."""
    return f"{name}#{next(_SERIAL)}"


def response_limits(prompts: DataProto, trajectories: Sequence[Trajectory], maximum: int) -> list[int]:
    """Maximum number of response tokens of each row: its column `max_new_tokens`, but at most `maximum`."""
    limits = prompts.non_tensor_batch.get("max_new_tokens", [None] * len(trajectories))
    pairs = zip(trajectories, limits, strict=True)
    return [_response_limit(limit, trajectory.sample_index, maximum) for trajectory, limit in pairs]


def _response_limit(value: Any, index: int, maximum: int) -> int:
    """Maximum number of response tokens of sample number `index` of a prompt. `value`: the row's `max_new_tokens`, one
    number for all samples or one per sample."""
    if value is None:
        return maximum
    if isinstance(value, Sequence | np.ndarray):
        if index >= len(value):
            raise ValueError(
                f"column 'max_new_tokens': a row has {len(value)} limits, but the prompt has a sample number {index}."
                " Use one number, or one per sample."
            )
        value = value[index]
    return min(maximum, int(value))


def _prompt_hash(token_ids: np.ndarray) -> str:
    return hashlib.blake2b(token_ids.astype(np.int64).tobytes(), digest_size=16).hexdigest()


def _count_earlier_equal(uids: list[str]) -> list[int]:
    """The number of equal entries before each entry."""
    counts: Counter[str] = Counter()
    numbers = []
    for uid in uids:
        numbers.append(counts[uid])
        counts[uid] += 1
    return numbers


# ---------------------------------------------------------------- jobs


@dataclass(slots=True, eq=False)
class RolloutTask:
    """One row to generate."""

    trajectory: Trajectory
    """The prompt; turns are added when the row has finished."""
    step: int
    """The training step, on which the sampling noise depends."""
    limit: int
    """Maximum number of response tokens of a context."""
    sampled: bool
    """False: greedy."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's object columns, for agent loops."""
    partial: Output | None = None
    """An earlier partial output of the first model call, to resume from."""
    reported: int = 0
    """Number of tokens of the first model call that were reported to the manager."""
    cancelled: bool = False
    result: Any = None
    """Set when the task has finished; `LoopHost._finished_trajectory` converts it to a trajectory."""
    key: str = ""
    """Unique in its job: the trajectory's name, or the row number in `generate_batch`, whose names may repeat."""

    @property
    def name(self) -> str:
        return self.trajectory.name

    @property
    def prompt_ids(self) -> list[int]:
        return np.asarray(self.trajectory.rows[0].prompt_ids).tolist()


class RolloutJob:
    """The rows of one consumer, with common sampling parameters."""

    def __init__(self, name: str, meta: Mapping[str, Any], params: SamplingParams, seed: int, pad: int) -> None:
        self.name, self.meta, self.params, self.seed = name, meta, params, seed
        self.pad_token_id = pad if meta.get("pad_token_id") is None else int(meta["pad_token_id"])
        self.agent_columns = bool(meta.get("agent_columns"))
        """Whether rows have the columns of agents (`num_turns`, `agent_metrics`, …), also single-turn rows."""
        self.unfinished: dict[str, RolloutTask] = {}
        self.finished: list[RolloutTask] = []
        self.prompt_width = 0
        self._variants: dict[tuple[bool, int], SamplingParams] = {}
        """Parameters of rows by (sampled, limit), without the noise key."""

    def tasks(self, rows: DataProto, partials: Mapping[str, Output], with_columns: bool) -> list[RolloutTask]:
        """The tasks of these rows; ValueError for a row with invalid columns. `with_columns`: tasks get the object
        columns, for agent loops."""
        trajectories = trajectories_from_prompts(rows)
        limits = response_limits(rows, trajectories, self.params.max_new_tokens)
        columns, step = rows.non_tensor_batch, int(rows.meta_info.get("step", self.meta.get("step", 0)))
        sampled = columns.get("do_sample", [self.params.do_sample] * len(rows))
        self.prompt_width = max(self.prompt_width, rows.batch["input_ids"].shape[1])
        tasks = []
        for row, trajectory in enumerate(trajectories):
            task = RolloutTask(trajectory, step, limits[row], bool(sampled[row]), key=trajectory.name)
            if with_columns:
                task.columns = {name: values[row] for name, values in columns.items()}
            task.partial = partials.get(trajectory.name)
            task.reported = 0 if task.partial is None else len(task.partial.token_ids)
            tasks.append(task)
        return tasks

    def request(self, task: RolloutTask, limit: int) -> Request:
        """The request of a task's first model call, of at most `limit` tokens. Its sampling noise depends on seed,
        step, uid and sample index."""
        uid, variant = task.trajectory.uid, (task.sampled, limit)
        if variant not in self._variants:
            minimum = self.params.min_new_tokens
            minimum = min(limit, minimum) if self.agent_columns else minimum
            self._variants[variant] = replace(
                self.params, do_sample=task.sampled, max_new_tokens=limit, min_new_tokens=minimum
            )
        params = self._variants[variant].with_key(sample_key(self.seed, task.step, uid, task.trajectory.sample_index))
        return Request(new_request_id(task.name), task.prompt_ids, params, uid, task.partial)

    def pack(self, trajectories: Sequence[Trajectory], experts_template: np.ndarray | None) -> DataProto:
        """The training rows of finished trajectories."""
        validate = bool(self.meta.get("validate"))
        longest = max(len(row.prompt_ids) for trajectory in trajectories for row in trajectory.rows)
        return rows_from_trajectories(
            trajectories,
            pad_token_id=self.pad_token_id,
            prompt_length=max(longest, self.prompt_width),
            response_length=self.params.max_new_tokens if self.meta.get("pad_to_max") else None,
            # Validation rows are not trained on, and have other sampling parameters.
            with_drawn=self.params.reshaped and not validate,
            with_experts=not validate,
            experts_template=experts_template,
        )
