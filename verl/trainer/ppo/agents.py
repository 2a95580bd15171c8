"""What agents say of their trajectories: how each ended, scores of their own, fields of their own as columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from verl.algos.trajectories import Trajectories
from verl.protocol import DataProto, object_array
from verl.trainer.common.guard import NoSamplesError
from verl.types.schema import RESERVED

FINISHED = "finished"
_FIELDS, _METRICS, _SCORE, _SAID = "extra_fields", "agent_metrics", "given_score", "reward_extra_info"


def spread_fields(batch: DataProto) -> None:
    """Each of the agents' own fields as a column, None where an agent did not give it. One that has the name of
    another column is `agent_<name>`."""
    if _FIELDS not in batch.non_tensor_batch:
        return
    fields = batch.pop(non_tensor_batch_keys=[_FIELDS]).non_tensor_batch[_FIELDS]
    taken = {*batch.batch.keys(), *batch.non_tensor_batch, *RESERVED}
    for name in dict.fromkeys(name for row in fields for name in row):
        column = f"agent_{name}" if name in taken else name
        batch.non_tensor_batch[column] = object_array([row.get(name) for row in fields])


def metrics_of(batch: DataProto, whole: Trajectories) -> list[Mapping[str, Any]]:
    """What each trajectory's agent measured; nothing of batches that no agent made."""
    columns = batch.non_tensor_batch
    return [found or {} for found in columns[_METRICS][whole.last_rows]] if _METRICS in columns else []


def statuses(batch: DataProto, whole: Trajectories) -> list[str]:
    """How each trajectory ended: finished, aborted or failed."""
    return [str(found.get("status", FINISHED)) for found in metrics_of(batch, whole)] or [FINISHED] * len(whole)


def require_some_finished(batch: DataProto, before: int = 0, enough: int = 1) -> int:
    """How many trajectories in a row did not go through to their end, with those `before` this batch; raise where that
    is all of the batch and `enough`: what stopped them all will stop the next ones too."""
    if _METRICS not in batch.non_tensor_batch:
        return 0
    whole = Trajectories.of(batch)
    found = metrics_of(batch, whole)
    if FINISHED in statuses(batch, whole):
        return 0
    if before + len(found) < enough:
        return before + len(found)
    errors = [str(each["error"]) for each in found if each.get("error")]
    raise NoSamplesError(
        f"agents: not one of {before + len(found)} trajectories went through to its end, and there is nothing to learn"
        f" from. The last failure: {errors[-1] if errors else 'the generation was aborted'}"
    )


def given_scores(batch: DataProto, whole: Trajectories) -> tuple[dict[int, float], np.ndarray]:
    """Scores that agents brought, by the number of the trajectory; and the numbers of those that are to be scored."""
    numbers = np.arange(len(whole))
    if _SCORE not in batch.non_tensor_batch:
        return {}, numbers
    finished = numbers[[status == FINISHED for status in statuses(batch, whole)]].tolist()
    brought = batch.non_tensor_batch[_SCORE][whole.last_rows]
    given = {number: float(brought[number]) for number in finished if brought[number] is not None}
    return given, np.array([number for number in finished if number not in given], dtype=np.int64)


def place_scores(given: Mapping[int, float], batch: DataProto, whole: Trajectories) -> torch.Tensor:
    """[batch, response]: each score on the last token that the model sampled for its trajectory; lost without any."""
    mask = batch.batch["response_mask"].bool()
    scores = torch.zeros(mask.shape)
    for number, score in given.items():
        row = whole.last_rows[number]
        if mask[row].any():
            scores[row, int(mask[row].nonzero().max())] = score
    return scores


def said_by_agents(batch: DataProto, whole: Trajectories) -> dict[str, list[Any]]:
    """What agents say about their scores (their field `reward_extra_info`): of every name one entry per trajectory."""
    if _SAID not in batch.non_tensor_batch:
        return {}
    said = [info or {} for info in batch.non_tensor_batch[_SAID][whole.last_rows]]
    return {name: [info.get(name) for info in said] for name in dict.fromkeys(name for info in said for name in info)}
