"""Teachers: assign rows to teachers and collect the teachers' log-probs of the student's responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.groups import WorkerGroups
from verl.trainer.ppo.teacher_servers import TeacherServer
from verl.utils import hf_tokenizer
from verl.utils.dataset.rows import value_at

Infer = Callable[[Callable[..., Any], DataProto, str], DataProto]
_KEY = "distillation.teacher_models"


class Teachers:
    """Computes the teacher columns; every row belongs to one teacher, a local model or a server."""

    def __init__(self, config: PPOConfig, groups: WorkerGroups) -> None:
        self._groups = groups
        self._source_key = config.data.reward_fn_key
        distillation, loss = config.distillation, config.distillation.distillation_loss
        self._servers = {
            name: TeacherServer(name, teacher.url, loss.topk if loss.over_top_tokens else 0)
            for name, teacher in distillation.teacher_models.items()
            if teacher.url and distillation.enabled
        }
        self._by_source = {teacher.key: name for name, teacher in config.distillation.teacher_models.items()}
        rollout = config.actor_rollout_ref.rollout
        self._student = config.actor_rollout_ref.model.path
        self._longest = min(rollout.max_model_len, config.data.max_prompt_length + rollout.max_new_tokens)

    def columns(self, batch: DataProto, infer: Infer) -> DataProto:
        """Return `teacher_log_prob` [batch, response] of every row under its own teacher; for a loss over the top-k
        tokens also their ids and log-probs.

        `infer(method, batch, role)` runs a forward pass of a worker group over a batch, like `WorkerGroups.infer`.
        """
        rows = rows_of_teachers(batch, self._source_key, self._by_source)
        parts = [
            self._columns_of(name, batch if len(rows) == 1 else batch.select_idxs(mine), infer)
            for name, mine in rows.items()
        ]
        if len(parts) == 1:
            return parts[0]
        if self._servers:
            return joined(parts, list(rows.values()), batch.batch["responses"].shape[1])
        return DataProto.concat(parts).select_idxs(np.argsort(np.concatenate(list(rows.values()))))

    def check_servers(self, tokenizer: Any) -> None:
        """Raise ValueError if a server is unreachable, has another vocabulary or too short a context."""
        for server in self._servers.values():
            server.check(tokenizer, self._student, self._longest)

    def _columns_of(self, name: str, batch: DataProto, infer: Infer) -> DataProto:
        if name in self._servers:
            return self._servers[name].columns(batch)
        return infer(partial(_ask, self._groups.teacher.compute_teacher_log_prob, name), batch, "teacher")


def rows_of_teachers(batch: DataProto, key: str, by_source: Mapping[str | None, str]) -> dict[str, np.ndarray]:
    """Return the row indices per teacher: by the data source in column `key`, else the default teacher."""
    columns = batch.non_tensor_batch
    sources = columns[key].tolist() if key in columns else [None] * len(batch)
    names = [by_source.get(source, by_source.get(None)) for source in sources]
    if None in names:
        raise ValueError(_no_teacher(sources[names.index(None)], key, by_source))
    of_row = np.array(names)
    return {str(name): np.flatnonzero(of_row == name) for name in dict.fromkeys(names)}


def joined(parts: Sequence[DataProto], rows: Sequence[np.ndarray], width: int) -> DataProto:
    """Join columns of local teachers and servers, padded to `width` response tokens, in the row order of the batch."""
    whole = {}
    for name in parts[0].batch.keys():
        values = [part.batch[name] for part in parts]
        whole[name] = values[0].new_zeros(sum(map(len, rows)), width, *values[0].shape[2:])
        for value, mine in zip(values, rows, strict=True):
            whole[name][torch.from_numpy(mine), : value.shape[1]] = value
    return DataProto.from_dict(whole)


def check_teachers(config: PPOConfig, folders: Mapping[str, str], tokenizer: Any, dataset: Any) -> None:
    """Raise ValueError unless all local teachers have the student's vocabulary and every data row has a teacher.

    `folders` maps model names to local folders."""
    distillation, student = config.distillation, config.actor_rollout_ref.model
    for name, teacher in distillation.local_teachers.items():
        path = teacher.model_path or ""
        own = hf_tokenizer(folders.get(path, path), trust_remote_code=student.trust_remote_code)
        _refuse_other_tokens(own.get_vocab(), tokenizer.get_vocab(), f"{_KEY}.{name}.model_path", path, student.path)
    by_source = {teacher.key: name for name, teacher in distillation.teacher_models.items()}
    key = config.data.reward_fn_key
    if not by_source or None in by_source or not hasattr(dataset, "rows"):
        return
    for first, rows in dataset.rows.batches([key.split(".")[0]]):
        for place, row in enumerate(rows):
            source = value_at(row, key)
            if source not in by_source:
                raise ValueError(f"{dataset.rows.where(first + place)}: {_no_teacher(source, key, by_source)}")


def _ask(method: Callable[..., Any], name: str, sent: DataProto) -> Any:
    sent.meta_info["teacher"] = name
    return method(sent)


def _no_teacher(source: Any, key: str, by_source: Mapping[str | None, str]) -> str:
    known = ", ".join(f"{name} for {source}" for source, name in by_source.items())
    return (
        f"{_KEY}: no teacher is for rows with {key} = {source!r} (there is: {known}). Give one of them this key, or"
        " leave out the key of the one that is for all other rows."
    )


def _refuse_other_tokens(own: Mapping[str, int], students: Mapping[str, int], key: str, path: str, of: str) -> None:
    if own == students:
        return
    token = next(iter(sorted(set(students.items()) ^ set(own.items()), key=lambda item: (item[1], item[0]))))[0]
    raise ValueError(
        f"{key}: {path} does not have the tokens of the student, actor_rollout_ref.model.path = {of}: {token!r} is"
        f" {own.get(token, 'none')} there and {students.get(token, 'none')} here, of {len(own)} and {len(students)}"
        " tokens. A teacher says how likely it finds each of the student's tokens: choose one of the same vocabulary."
    )
