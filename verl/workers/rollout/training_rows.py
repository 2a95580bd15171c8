"""Conversion of trajectories, of any engine or agent, to the rows that training reads, and back.

`response_mask` is 0 for tokens that the model did not generate (tool output, users) and for unfinished trajectories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.config import ModelConfig, RolloutConfig
from verl.models.loading import read_config
from verl.models.routing import empty_routes
from verl.protocol import DataProto, object_array
from verl.types.request import combine_calls, unknown_experts
from verl.types.schema import COLUMNS
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.fs import resolve_model_path
from verl.utils.model import compute_position_id_with_mask


def rows_from_trajectories(
    trajectories: Sequence[Trajectory],
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    with_drawn: bool = False,
    with_experts: bool = True,
    experts_template: np.ndarray | None = None,
) -> DataProto:
    """The generated batch, on the CPU: trajectories in order; the rows of a trajectory are adjacent.

    Prompts are left-padded to the longest prompt or to `prompt_length`, responses right-padded to the longest or to
    `response_length`. `response_mask` is 1 exactly on tokens that the model sampled (including end tokens) in finished
    trajectories; `attention_mask` also on tokens of the environment. Unknown log-probs of sampled tokens are NaN,
    unknown versions -1; on other tokens they are 0 and -1.

    `with_drawn` adds `rollout_drawn_log_probs`: log-probs under the distribution that was sampled from, after
    truncation and penalties. `with_experts` adds `routed_experts` if a turn has them, or if `experts_template`
    [0, layers, k] defines the shape and dtype of a column of unknown values. If a trajectory has an `extra`, the batch
    has the columns of agents (`_agent_columns`).
    """
    owners = [trajectory for trajectory in trajectories for _ in trajectory.rows]
    rows = [row for trajectory in trajectories for row in trajectory.rows]
    prompt_sizes, sizes = [len(row.prompt_ids) for row in rows], [row.response_length for row in rows]
    in_prompt = np.flip(_valid_columns("prompt_length", prompt_sizes, prompt_length), axis=1)
    in_response = _valid_columns("response_length", sizes, response_length)
    turns = [turn for row in rows for turn in row.turns]
    prompts = _fill_table(in_prompt, _concatenate((row.prompt_ids for row in rows), np.int64), pad_token_id)
    responses = _fill_table(in_response, _concatenate((turn.token_ids for turn in turns), np.int64), pad_token_id)
    turn_sizes = [len(turn.token_ids) for turn in turns]
    by_model = np.repeat(np.array([turn.source == "model" for turn in turns], np.bool_), turn_sizes)
    sampled = _fill_table(in_response, by_model, False)
    attention_mask = torch.from_numpy(np.concatenate([in_prompt, in_response], axis=1).astype(np.int64))
    columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
        # Tool output is masked out of the loss here: its turns have another source than "model".
        "response_mask": (sampled & _finished_mask(owners)).astype(np.int64),
        **_sampled_columns(turns, sampled, with_drawn),
    }
    known = next((turn.routed_experts for turn in turns if turn.routed_experts is not None), experts_template)
    if with_experts and known is not None:
        columns["routed_experts"] = _routed_experts(rows, known, prompts.shape[1], attention_mask.shape[1])
    has_agent_columns = any(trajectory.extra for trajectory in trajectories)
    if has_agent_columns or any(turn.reward is not None for turn in turns):
        columns["turn_rewards"] = _turn_rewards(trajectories, sampled)
    objects: dict[str, list[Any]] = {
        "uid": [owner.uid for owner in owners],
        "sample_index": [owner.sample_index for owner in owners],
        "trajectory": [owner.name for owner in owners],
        "finish_reason": [row.finish_reason for row in rows],
        **(_agent_columns(owners, rows) if has_agent_columns else {}),
    }
    return DataProto.from_dict(
        {name: torch.as_tensor(column) for name, column in columns.items()},
        {name: object_array(values) for name, values in objects.items()},
    )


def trajectories_from_rows(batch: DataProto) -> list[Trajectory]:
    """The inverse of `rows_from_trajectories`, for batches in which the rows of each trajectory are adjacent.

    `status` and `score` are not set. Without agent columns, a row has a single turn of the model.
    """
    columns = batch.non_tensor_batch
    width = batch.batch["responses"].shape[1]
    mask = batch.batch["attention_mask"].bool().numpy()
    arrays = {name: batch.batch[name].numpy() for name in _TOKEN_COLUMNS if name in batch.batch.keys()}
    trajectories: list[Trajectory] = []
    for number, name in enumerate(columns["trajectory"]):
        prompt_width = mask.shape[1] - width
        in_prompt, in_response = mask[number, :prompt_width], mask[number, prompt_width:]
        tokens = {column: values[number][in_response] for column, values in arrays.items()}
        turns = _turns_from_row(tokens, columns["agent_turns"][number] if "agent_turns" in columns else None)
        _restore_end(turns, columns["finish_reason"][number])
        if "routed_experts" in batch.batch.keys():
            turns[-1].routed_experts = batch.batch["routed_experts"].numpy()[number][mask[number]]
        messages = columns["agent_messages"][number] if "agent_messages" in columns else None
        row = Row(batch.batch["prompts"].numpy()[number][in_prompt], turns, messages)
        uid, _, index = str(name).rpartition("/")
        if not trajectories or trajectories[-1].name != name:
            trajectories.append(Trajectory(uid, int(index), [], extra=_extra_from_row(columns, number)))
        trajectories[-1].rows.append(row)
    return trajectories


_TOKEN_COLUMNS = ("responses", "rollout_log_probs", "rollout_versions", "rollout_drawn_log_probs")


def _turns_from_row(tokens: Mapping[str, np.ndarray], agent_turns: Sequence[Any] | None) -> list[Turn]:
    """The turns of a row. `agent_turns`: see `_agent_columns`; None: one turn of the model."""
    length = len(tokens["responses"])
    model_turn = [("model", length, None, None)] if length else []
    spans: Sequence[Any] = model_turn if agent_turns is None else agent_turns
    turns, start = [], 0
    for source, count, name, reward in spans:
        part: dict[str, Any] = {column: values[start : start + count] for column, values in tokens.items()}
        turn = Turn(source, part["responses"], reward=reward, name=name)
        if source == "model":
            turn.log_probs, turn.versions = part["rollout_log_probs"], part["rollout_versions"].tolist()
            turn.drawn_log_probs = part["rollout_drawn_log_probs"] if "rollout_drawn_log_probs" in part else None
        turns.append(turn)
        start += count
    return turns


def _restore_end(turns: list[Turn], finish_reason: str | None) -> None:
    """Set the finish reason of the last model turn; a row without a model turn gets an empty model turn."""
    last = next((turn for turn in reversed(turns) if turn.source == "model"), None)
    if last is None:
        last = Turn("model", [], [], [])
        turns.append(last)
    last.finish_reason = finish_reason


def _extra_from_row(columns: Mapping[str, Any], number: int) -> dict[str, Any]:
    if "agent_metrics" not in columns:
        return {}
    known = {name: columns[name][number] for name in ("num_turns", "agent_metrics")}
    return {**known, **(columns["extra_fields"][number] or {})}


def with_object_columns(generated: DataProto, prompts: DataProto) -> DataProto:
    """Add the object columns of `prompts` to the generated rows, if there is one per prompt; without columns that only
    generation reads."""
    if len(generated) == len(prompts):
        for name, array in prompts.non_tensor_batch.items():
            if name not in COLUMNS or COLUMNS[name].read_by != ("generate",):
                generated.non_tensor_batch.setdefault(name, array)
    return generated


def experts_template(model: ModelConfig, rollout: RolloutConfig) -> np.ndarray | None:
    """An empty array [0, layers, k] with the dtype of `routed_experts`; None if the rollout does not return experts."""
    if not rollout.return_routed_experts:
        return None
    folder = resolve_model_path(model.path, "actor_rollout_ref.model.path")
    return empty_routes(read_config(folder, model.trust_remote_code, model.override_config)).numpy()


def _sampled_columns(turns: Sequence[Turn], sampled: np.ndarray, with_drawn: bool) -> dict[str, np.ndarray]:
    """Log-probs and versions of the model's tokens, which are at the positions `sampled` [rows, response]."""
    turns = [turn for turn in turns if turn.source == "model"]
    values_by_turn: dict[str, list[Any]] = {
        "rollout_log_probs": [turn.log_probs for turn in turns],
        "rollout_versions": [turn.versions for turn in turns],
    }
    if with_drawn:
        values_by_turn["rollout_drawn_log_probs"] = [turn.drawn_log_probs for turn in turns]
    columns = {}
    for name, values in values_by_turn.items():
        unknown = -1 if name == "rollout_versions" else np.nan
        known = (
            [unknown] * len(turn.token_ids) if value is None else value
            for turn, value in zip(turns, values, strict=True)
        )
        columns[name] = _fill_table(
            sampled, _concatenate(known, np.dtype(COLUMNS[name].dtype)), COLUMNS[name].filler or 0
        )
    return columns


def _routed_experts(rows: Sequence[Row], like: np.ndarray, prompt_width: int, width: int) -> np.ndarray:
    """[rows, width, layers, k]: the experts of each token in the forward pass that sampled the next token; the largest
    value of the dtype where they are unknown."""
    table = unknown_experts(like, len(rows) * width).reshape(len(rows), width, *like.shape[1:])
    for row_table, row in zip(table, rows, strict=True):
        experts, start = None, len(row.prompt_ids)
        for turn in row.turns:
            experts = combine_calls(experts, turn.routed_experts, start)
            start += len(turn.token_ids)
        if experts is not None:
            first = prompt_width - len(row.prompt_ids)
            row_table[first : first + min(start, len(experts))] = experts[:start]
    return table


def _finished_mask(owners: Sequence[Trajectory]) -> np.ndarray:
    """[rows, 1] bool: whether the trajectory of each row is finished."""
    return np.array([owner.status == "finished" for owner in owners], dtype=np.bool_).reshape(-1, 1)


def _turn_rewards(trajectories: Sequence[Trajectory], sampled: np.ndarray) -> np.ndarray:
    """[rows, response]: the reward of each turn, at the last token that the model has sampled until the end of the turn
    (in any row of the trajectory), or at the first sampled token if the model has sampled none."""
    table = np.zeros(sampled.shape, dtype=np.float32)
    if all(turn.reward is None for trajectory in trajectories for row in trajectory.rows for turn in row.turns):
        return table
    first = 0
    for trajectory in trajectories:
        last = first + len(trajectory.rows)
        positions, count = np.argwhere(sampled[first:last]) + [first, 0], 0
        for turn in (turn for row in trajectory.rows for turn in row.turns):
            count += len(turn.token_ids) if turn.source == "model" else 0
            if turn.reward is not None and len(positions):
                table[tuple(positions[max(0, count - 1)])] += turn.reward
        first = last
    return table


def _agent_columns(owners: Sequence[Trajectory], rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Columns that rows of agents always have, so that rows of several workers can be joined: metadata of the
    trajectory, repeated on each of its rows, and the turns of each row. Other keys of `Trajectory.extra` are together
    in `extra_fields`."""
    known = ("num_turns", "agent_metrics")
    return {
        **{name: [owner.extra.get(name) for owner in owners] for name in known},
        "extra_fields": [{k: v for k, v in owner.extra.items() if k not in known} for owner in owners],
        "given_score": [owner.score for owner in owners],
        "agent_messages": [row.messages for row in rows],
        "agent_turns": [
            [(turn.source, len(turn.token_ids), turn.name, turn.reward) for turn in row.turns if len(turn.token_ids)]
            for row in rows
        ],
    }


def _valid_columns(name: str, lengths: Sequence[int], width: int | None) -> np.ndarray:
    """[rows, width] bool: True in the first `lengths` columns of each row."""
    longest = max(lengths, default=0)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"{name}: {width} columns cannot hold {longest} tokens.")
    return np.arange(width) < np.reshape(lengths, (-1, 1))


def _fill_table(mask: np.ndarray, values: np.ndarray, fill: float) -> np.ndarray:
    """An array with the values, in row-major order, where `mask` is True, and `fill` elsewhere."""
    table = np.full(mask.shape, fill, dtype=values.dtype)
    table[mask] = values
    return table


def _concatenate(parts: Iterable[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])
