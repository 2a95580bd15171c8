"""Teachers: log-probs of the student's responses under teacher models, which are local or served (TeacherServer)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.utils import hf_tokenizer
from verl.utils.dataset.rows import value_at
from verl.utils.network import request_json

Infer = Callable[[Callable[..., Any], DataProto, str], DataProto]
_KEY = "distillation.teacher_models"
# Concurrent requests per server.
_MAX_REQUESTS = 64
# Number of tokens whose text is compared with the student's before training, to check a server's vocabulary.
_PROBED_TOKENS = 32


class Teachers:
    """Computes the teacher columns of a batch. The data source of a row selects its teacher."""

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
        tokens also `teacher_top_ids` and `teacher_top_log_probs` [batch, response, k].

        `infer(method, batch, role)` runs a forward pass of a worker group over a batch, like `WorkerGroups.infer`.
        """
        rows = rows_of_teachers(batch, self._source_key, self._by_source)
        parts = [
            self._columns_of(name, batch if len(rows) == 1 else batch.select_idxs(indices), infer)
            for name, indices in rows.items()
        ]
        if len(parts) == 1:
            return parts[0]
        if self._servers:
            return join_columns(parts, list(rows.values()), batch.batch["responses"].shape[1])
        return DataProto.concat(parts).select_idxs(np.argsort(np.concatenate(list(rows.values()))))

    def check_servers(self, tokenizer: Any) -> None:
        """Raise ValueError if a server is unreachable, has another vocabulary or too short a context."""
        for server in self._servers.values():
            server.check(tokenizer, self._student, self._longest)

    def _columns_of(self, name: str, batch: DataProto, infer: Infer) -> DataProto:
        if name in self._servers:
            return self._servers[name].columns(batch)
        return infer(partial(_call_teacher, self._groups.teacher.compute_teacher_log_prob, name), batch, "teacher")


class TeacherServer:
    """Client of servers with `/v1/completions` and `prompt_logprobs`: `verl.inference.server`, `vllm serve`."""

    def __init__(self, name: str, urls: Sequence[str], top_k: int) -> None:
        self._key = f"distillation.teacher_models.{name}.url"
        self._urls, self._top_k = [url.rstrip("/").removesuffix("/v1") for url in urls], top_k
        self._models: dict[str, dict[str, Any]] = {}

    def columns(self, batch: DataProto) -> DataProto:
        """Return the same columns as `Teachers.columns`."""
        masks, width = batch.batch["attention_mask"].bool(), batch.batch["responses"].shape[1]
        rows = [ids[mask].tolist() for ids, mask in zip(batch.batch["input_ids"], masks, strict=True)]
        log_probs = asyncio.run(self._prompt_log_probs(rows))
        lengths = masks[:, -width:].sum(dim=1).tolist()
        columns = {"teacher_log_prob": torch.zeros(len(rows), width)}
        if self._top_k:
            columns["teacher_top_ids"] = torch.zeros(len(rows), width, self._top_k, dtype=torch.int32)
            columns["teacher_top_log_probs"] = torch.zeros(len(rows), width, self._top_k)
        for row, (ids, tokens, length) in enumerate(zip(rows, log_probs, lengths, strict=True)):
            self._fill(row, ids[len(ids) - length :], tokens[len(tokens) - length :], columns)
        return DataProto.from_dict(columns)

    def check(self, tokenizer: Any, student: str, longest: int) -> None:
        """Raise ValueError if a server is unreachable, has another vocabulary than the student, or does not accept rows
        of `longest` tokens."""
        size = len(tokenizer)
        probe = sorted({size * number // _PROBED_TOKENS for number in range(_PROBED_TOKENS)} | {size - 1})
        for url in self._urls:
            log_probs = asyncio.run(self._prompt_log_probs([probe], url))[0]
            self._check_context(url, longest)
            for token, entry in zip(probe[1:], log_probs[1:], strict=True):
                text = entry[str(token)].get("decoded_token")
                expected = tokenizer.decode([token], clean_up_tokenization_spaces=False)
                if text is not None and text != expected and "\ufffd" not in expected:
                    raise ValueError(
                        f"{self._key}: {url} has another vocabulary than the student, actor_rollout_ref.model.path ="
                        f" {student}: token {token} is {text!r} on the server and {expected!r} for the student. Serve"
                        " a model with the same vocabulary."
                    )

    def _check_context(self, url: str, longest: int) -> None:
        # Some servers do not report their limit. vLLM always samples one more token, which must fit, too.
        limit = self._models[url].get("max_model_len")
        if limit is not None and longest >= limit:
            raise ValueError(
                f"{self._key}: {url} accepts up to {limit} tokens (max_model_len), but rows have up to {longest}"
                " (data.max_prompt_length + actor_rollout_ref.rollout.max_new_tokens), plus one sampled token."
                f" Serve it with --max-model-len {longest + 1} or more, or shorten data.max_prompt_length or"
                " data.max_response_length."
            )

    def _fill(self, row: int, ids: list[int], tokens: list[Any], columns: Mapping[str, torch.Tensor]) -> None:
        """Write the log-probs of a response into its row. `tokens`: per token, log-probs by token id."""
        log_probs = [entry[str(token)]["logprob"] for token, entry in zip(ids, tokens, strict=True)]
        columns["teacher_log_prob"][row, : len(ids)] = torch.tensor(log_probs)
        if not self._top_k or not ids:
            return
        top = [
            sorted(((value["logprob"], int(token)) for token, value in entry.items()), reverse=True)[: self._top_k]
            for entry in tokens
        ]
        fewest = min(map(len, top))
        if fewest < self._top_k:
            raise ValueError(
                f"{self._key}: the server returned {fewest} of the {self._top_k} requested top tokens."
                " Lower distillation.distillation_loss.topk, or raise the server's limit (vllm serve --max-logprobs)."
            )
        values = torch.from_numpy(np.array(top))  # float64 represents token ids exactly
        columns["teacher_top_log_probs"][row, : len(ids)] = values[..., 0].float()
        columns["teacher_top_ids"][row, : len(ids)] = values[..., 1].int()

    async def _prompt_log_probs(self, rows: Sequence[list[int]], url: str | None = None) -> list[list[Any]]:
        """Return `prompt_logprobs` of every row, in order. Rows are sent to the servers (or `url`) in turn."""
        import httpx

        limit = asyncio.Semaphore(_MAX_REQUESTS * len(self._urls))
        urls = [url] if url else self._urls
        # trust_env=False: proxies of the environment are not for these servers.
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30), trust_env=False) as http:
            for server in urls:
                if server not in self._models:
                    self._models[server] = (await self._reply(http, server, "/v1/models", None))["data"][0]

            async def request(server: str, ids: list[int]) -> list[Any]:
                body = {
                    "model": self._models[server]["id"],
                    "prompt": ids,
                    "max_tokens": 1,
                    "prompt_logprobs": self._top_k,
                }
                async with limit:
                    reply = await self._reply(http, server, "/v1/completions", body)
                return reply["choices"][0]["prompt_logprobs"]

            turns = itertools.cycle(urls)
            return list(await asyncio.gather(*(request(server, ids) for server, ids in zip(turns, rows, strict=False))))

    async def _reply(self, http: Any, url: str, path: str, body: dict[str, Any] | None) -> Any:
        """Send a request (GET if `body` is None) and return the JSON reply; retry if the server is unreachable or
        overloaded."""
        remedy = ". Start it (python -m verl.inference.server --model …, or vllm serve), or correct the address."
        return await request_json(http, self._key, url + path, body, remedy)


def rows_of_teachers(batch: DataProto, key: str, by_source: Mapping[str | None, str]) -> dict[str, np.ndarray]:
    """Return the row indices of each teacher. `by_source`: teacher by data source (column `key`); None: the default."""
    columns = batch.non_tensor_batch
    sources = columns[key].tolist() if key in columns else [None] * len(batch)
    names = [by_source.get(source, by_source.get(None)) for source in sources]
    if None in names:
        raise ValueError(_no_teacher(sources[names.index(None)], key, by_source))
    of_row = np.array(names)
    return {str(name): np.flatnonzero(of_row == name) for name in dict.fromkeys(names)}


def join_columns(parts: Sequence[DataProto], rows: Sequence[np.ndarray], width: int) -> DataProto:
    """Join columns of local teachers and servers, padded to `width` response tokens, in the row order of the batch."""
    columns = {}
    for name in parts[0].batch.keys():
        values = [part.batch[name] for part in parts]
        columns[name] = values[0].new_zeros(sum(map(len, rows)), width, *values[0].shape[2:])
        for value, indices in zip(values, rows, strict=True):
            columns[name][torch.from_numpy(indices), : value.shape[1]] = value
    return DataProto.from_dict(columns)


def check_teachers(config: PPOConfig, folders: Mapping[str, str], tokenizer: Any, dataset: Any) -> None:
    """Raise ValueError unless all local teachers have the student's vocabulary and every data row has a teacher.

    `folders`: local folder of each model path.
    """
    distillation, student = config.distillation, config.actor_rollout_ref.model
    for name, teacher in distillation.local_teachers.items():
        path = teacher.model_path or ""
        vocabulary = hf_tokenizer(folders.get(path, path), trust_remote_code=student.trust_remote_code).get_vocab()
        _check_vocabulary(vocabulary, tokenizer.get_vocab(), f"{_KEY}.{name}.model_path", path, student.path)
    by_source = {teacher.key: name for name, teacher in distillation.teacher_models.items()}
    key = config.data.reward_fn_key
    if not by_source or None in by_source or not hasattr(dataset, "rows"):
        return
    for first, rows in dataset.rows.batches([key.split(".")[0]]):
        for number, row in enumerate(rows, start=first):
            source = value_at(row, key)
            if source not in by_source:
                raise ValueError(f"{dataset.rows.where(number)}: {_no_teacher(source, key, by_source)}")


def _call_teacher(method: Callable[..., Any], name: str, sent: DataProto) -> Any:
    sent.meta_info["teacher"] = name
    return method(sent)


def _no_teacher(source: Any, key: str, by_source: Mapping[str | None, str]) -> str:
    known = ", ".join(f"{name} for {source}" for source, name in by_source.items())
    return (
        f"{_KEY}: no teacher for rows with {key} = {source!r} (teachers: {known}). Set the `key` of one of them to it,"
        " or remove the `key` of the teacher for all other rows."
    )


def _check_vocabulary(
    teacher: Mapping[str, int], student: Mapping[str, int], key: str, teacher_path: str, student_path: str
) -> None:
    if teacher == student:
        return
    differing = set(student.items()) ^ set(teacher.items())
    token = min(differing, key=lambda item: (item[1], item[0]))[0]
    raise ValueError(
        f"{key}: {teacher_path} has another vocabulary than the student, actor_rollout_ref.model.path = {student_path}:"
        f" {token!r} has id {teacher.get(token, 'none')} in the teacher and {student.get(token, 'none')} in the student"
        f" ({len(teacher)} and {len(student)} tokens in all). Choose a teacher with the same vocabulary."
    )
