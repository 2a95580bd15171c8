"""From a batch of prompts to requests: whose noise, which sampling parameters."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.types.request import Request, SamplingParams
from verl.utils.counter_noise import sample_keys

__all__ = ["requests_from_prompts", "sampling_params"]

_SERIAL = itertools.count()
_FROM_CONFIG = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "do_sample",
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
# What a batch may say about its own sampling in meta_info, under these names.
_FROM_BATCH = (
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_new_tokens",
    "min_new_tokens",
    "stop",
    "ignore_eos",
)
_OTHER_SPELLINGS = {"response_length": "max_new_tokens", "eos_token_id": "eos_token_ids"}
_SETTABLE = {field.name for field in fields(SamplingParams)} - {"key"}


def sampling_params(
    config: RolloutConfig, meta_info: Mapping[str, Any], default_eos: Iterable[int] = (), **overrides: Any
) -> SamplingParams:
    """The configuration's parameters (validation's when `meta_info["validate"]`), then the batch's, then overrides."""
    values: dict[str, Any] = {name: config[name] for name in _FROM_CONFIG}
    values["eos_token_ids"] = default_eos
    if meta_info.get("validate"):
        values |= {name: config.val_kwargs[name] for name in config.val_kwargs if name != "n"}
    if meta_info.get("eos_token_id") is not None:
        values["eos_token_ids"] = meta_info["eos_token_id"]
    values |= {name: meta_info[name] for name in _FROM_BATCH if meta_info.get(name) is not None}
    for name, value in overrides.items():
        known = _OTHER_SPELLINGS.get(name, name)
        if known not in _SETTABLE:
            raise ValueError(f"generate_sequences: no sampling parameter {name!r}. There are {sorted(_SETTABLE)}.")
        values[known] = value
    for name in ("eos_token_ids", "stop_token_ids"):
        ids = values[name]
        values[name] = frozenset([ids] if isinstance(ids, int) else (int(i) for i in ids or ()))
    stop = values["stop"]
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return SamplingParams(**values)


def requests_from_prompts(prompts: DataProto, params: SamplingParams, seed: int) -> list[Request]:
    """One request per row, in row order.

    Noise belongs to (seed, step, uid, sample_index). Without `sample_index`, rows of one uid are numbered in order;
    without `uid`, a prompt's tokens stand for it. A column `do_sample` says for each row whether it is sampled; a
    column `max_new_tokens` (a number, or a list with one per sample of the prompt) shortens single answers.
    """
    step = int(prompts.meta_info.get("step", 0))
    token_lists = _unpadded(prompts.batch["input_ids"], prompts.batch["attention_mask"])
    uids = [str(uid) for uid in prompts.non_tensor_batch.get("uid", [_uid_of(ids) for ids in token_lists])]
    indices = prompts.non_tensor_batch.get("sample_index", _occurrence(uids))
    sampled = prompts.non_tensor_batch.get("do_sample", [params.do_sample] * len(uids))
    limits = prompts.non_tensor_batch.get("max_new_tokens", [None] * len(uids))
    return [
        Request(
            id=f"{uid}/{int(index)}#{next(_SERIAL)}",
            prompt_ids=ids,
            params=replace(
                params,
                key=sample_keys(seed, step, uid, int(index)),
                do_sample=bool(one_sampled),
                max_new_tokens=_limit(limit, int(index), params.max_new_tokens),
            ),
            group=uid,
        )
        for ids, uid, index, one_sampled, limit in zip(token_lists, uids, indices, sampled, limits, strict=True)
    ]


def _limit(given: Any, index: int, most: int) -> int:
    """How many tokens sample number `index` of a prompt may have, by the row's `max_new_tokens`; never above `most`."""
    if given is None:
        return most
    if isinstance(given, Sequence | np.ndarray):
        if index >= len(given):
            raise ValueError(
                f"max_new_tokens: a row has {len(given)} limits, and there is a sample number {index}. Give one "
                "number, or as many as actor_rollout_ref.rollout.n."
            )
        given = given[index]
    return min(most, int(given))


def _unpadded(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """Token ids of each row without its padding."""
    return [
        ids[mask].tolist() for ids, mask in zip(input_ids.cpu().numpy(), attention_mask.cpu().numpy() != 0, strict=True)
    ]


def _uid_of(token_ids: list[int]) -> str:
    return hashlib.blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=16).hexdigest()


def _occurrence(uids: list[str]) -> list[int]:
    """For each entry, how many equal ones came before it."""
    seen: Counter[str] = Counter()
    numbers = []
    for uid in uids:
        numbers.append(seen[uid])
        seen[uid] += 1
    return numbers
