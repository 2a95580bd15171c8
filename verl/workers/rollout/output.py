"""The one assembler: trajectories of any engine or agent become the rows that training reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, object_array
from verl.types.schema import COLUMNS
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.model import compute_position_id_with_mask

__all__ = ["rows_from_trajectories"]


def rows_from_trajectories(
    trajectories: Sequence[Trajectory],
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    max_model_len: int | None = None,
    with_drawn: bool = False,
) -> DataProto:
    """The generated batch, on the CPU: every trajectory's rows together, in order.

    Prompts are padded on the left to the longest one or to `prompt_length`, responses on the right to the longest one
    or to `response_length`. `response_mask` is 1 exactly on tokens that the model sampled (end tokens included),
    `attention_mask` also on the environment's. Elsewhere log-probs are 0 and versions -1. A column of them is there
    if every sampled token has one; `with_drawn` adds `rollout_drawn_log_probs`, under the distribution really drawn
    from. `turn_rewards` holds what turns earned, where any has a reward; `rm_scores` the trajectories' scores, where
    all have one. A trajectory's `extra` is on each of its rows.
    """
    owners = [trajectory for trajectory in trajectories for _ in trajectory.rows]
    rows = [row for trajectory in trajectories for row in trajectory.rows]
    prompt_sizes, sizes = [len(row.prompt_ids) for row in rows], [row.response_length for row in rows]
    _check_lengths(owners, np.add(prompt_sizes, sizes), max_model_len)
    in_prompt = np.flip(_places("prompt_length", prompt_sizes, prompt_length), axis=1)
    in_response = _places("response_length", sizes, response_length)
    turns = [turn for row in rows for turn in row.turns]
    prompts = _table(in_prompt, _joined((row.prompt_ids for row in rows), np.int64), pad_token_id)
    responses = _table(in_response, _joined((turn.token_ids for turn in turns), np.int64), pad_token_id)
    by_model = _joined((np.full(len(turn.token_ids), turn.source == "model") for turn in turns), np.bool_)
    sampled = _table(in_response, by_model, False)
    attention_mask = torch.from_numpy(np.concatenate([in_prompt, in_response], axis=1).astype(np.int64))
    columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
        "response_mask": sampled.astype(np.int64),
        **_sampled_columns(turns, sampled, with_drawn),
        **_rewards(owners, rows, sampled),
    }
    extras = dict.fromkeys(name for trajectory in trajectories for name in trajectory.extra)
    objects: dict[str, list[Any]] = {
        "uid": [owner.uid for owner in owners],
        "sample_index": [owner.sample_index for owner in owners],
        "trajectory": [owner.name for owner in owners],
        "finish_reason": [row.finish_reason for row in rows],
        **{name: [owner.extra.get(name) for owner in owners] for name in extras},
    }
    return DataProto.from_dict(
        {name: torch.as_tensor(column) for name, column in columns.items()},
        {name: object_array(values) for name, values in objects.items()},
    )


def _sampled_columns(turns: Sequence[Turn], sampled: np.ndarray, with_drawn: bool) -> dict[str, np.ndarray]:
    """What the model says of its tokens; `sampled` [rows, response] is where they stand."""
    turns = [turn for turn in turns if turn.source == "model" and len(turn.token_ids)]
    said: dict[str, list[Any]] = {
        "rollout_log_probs": [turn.log_probs for turn in turns],
        "rollout_versions": [turn.versions for turn in turns],
    }
    if with_drawn:
        said["rollout_drawn_log_probs"] = [turn.drawn_log_probs for turn in turns]
    return {
        name: _table(sampled, _joined(values, np.dtype(COLUMNS[name].dtype)), COLUMNS[name].filler or 0)
        for name, values in said.items()
        if not any(value is None for value in values)
    }


def _rewards(owners: Sequence[Trajectory], rows: Sequence[Row], sampled: np.ndarray) -> dict[str, np.ndarray]:
    """`turn_rewards` and `rm_scores`, where there are any."""
    earned = [
        (number, end, turn.reward)
        for number, row in enumerate(rows)
        for turn, end in zip(row.turns, accumulate(len(turn.token_ids) for turn in row.turns), strict=True)
        if turn.reward is not None
    ]
    columns = {"turn_rewards": _on_last_sampled(sampled, earned)} if earned else {}
    scores = {owner.name: (number, sampled.shape[1], owner.score) for number, owner in enumerate(owners)}
    if scores and all(score is not None for *_, score in scores.values()):
        columns["rm_scores"] = _on_last_sampled(sampled, scores.values())  # by name: each trajectory's last row is left
    return columns


def _on_last_sampled(sampled: np.ndarray, earned: Iterable[tuple[int, int, Any]]) -> np.ndarray:
    """(row, end, reward): on the last token before column `end` that the model sampled; lost where there is none."""
    table = np.zeros(sampled.shape, dtype=np.float32)
    for row, end, reward in earned:
        before = np.flatnonzero(sampled[row, :end])
        if len(before):
            table[row, before[-1]] += reward
    return table


def _check_lengths(owners: Sequence[Trajectory], lengths: np.ndarray, max_model_len: int | None) -> None:
    if max_model_len is not None and len(lengths) and lengths.max() > max_model_len:
        name = owners[int(lengths.argmax())].name
        raise ValueError(
            f"trajectory {name!r}: a row of {lengths.max()} tokens is longer than max_model_len={max_model_len}."
        )


def _places(name: str, lengths: Sequence[int], width: int | None) -> np.ndarray:
    """[rows, width] bool: the first `lengths` columns of each row."""
    longest = max(lengths, default=0)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"{name}: {width} columns cannot hold {longest} tokens.")
    return np.arange(width) < np.reshape(lengths, (-1, 1))


def _table(places: np.ndarray, values: np.ndarray, fill: float) -> np.ndarray:
    """Values in reading order at the places, `fill` elsewhere."""
    table = np.full(places.shape, fill, dtype=values.dtype)
    table[places] = values
    return table


def _joined(parts: Iterable[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])
