"""TeacherServer: log-probs of given tokens from servers that run elsewhere, many rows at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.network import request_json

__all__ = ["TeacherServer"]

_AT_ONCE = 64
# Tokens that a server is asked about before training, to see that its vocabulary is the student's.
_PROBED = 32


class TeacherServer:
    """Speaks `/v1/completions` with `prompt_logprobs`: `python -m verl.inference.server`, `vllm serve`."""

    def __init__(self, name: str, urls: Sequence[str], top_k: int) -> None:
        self._key = f"distillation.teacher_models.{name}.url"
        self._urls, self._top_k = [url.rstrip("/").removesuffix("/v1") for url in urls], top_k
        self._models: dict[str, dict[str, Any]] = {}

    def columns(self, batch: DataProto) -> DataProto:
        """`teacher_log_prob` [batch, response] and, for a loss over the likeliest tokens, their columns."""
        masks, width = batch.batch["attention_mask"].bool(), batch.batch["responses"].shape[1]
        rows = [ids[mask].tolist() for ids, mask in zip(batch.batch["input_ids"], masks, strict=True)]
        told = asyncio.run(self._ask_all(rows))
        lengths = masks[:, -width:].sum(dim=1).tolist()
        found = {"teacher_log_prob": torch.zeros(len(rows), width)}
        if self._top_k:
            found["teacher_top_ids"] = torch.zeros(len(rows), width, self._top_k, dtype=torch.int32)
            found["teacher_top_log_probs"] = torch.zeros(len(rows), width, self._top_k)
        for row, (ids, places, length) in enumerate(zip(rows, told, lengths, strict=True)):
            self._fill(row, ids[len(ids) - length :], places[len(places) - length :], found)
        return DataProto.from_dict(found)

    def check(self, tokenizer: Any, student: str, longest: int) -> None:
        """ValueError where nobody answers, another vocabulary is served than the student's, or rows of `longest` tokens
        are too long."""
        size = len(tokenizer)
        probe = sorted({size * place // _PROBED for place in range(_PROBED)} | {size - 1})
        for url in self._urls:
            places = asyncio.run(self._ask_all([probe], url))[0]
            self._refuse_short(url, longest)
            for token, place in zip(probe[1:], places[1:], strict=True):
                said = place[str(token)].get("decoded_token")
                mine = tokenizer.decode([token], clean_up_tokenization_spaces=False)
                if said is not None and said != mine and "\ufffd" not in mine:
                    raise ValueError(
                        f"{self._key}: {url} does not have the tokens of the student, actor_rollout_ref.model.path ="
                        f" {student}: token {token} is {said!r} there and {mine!r} here. Serve a model of the same"
                        " vocabulary."
                    )

    def _refuse_short(self, url: str, longest: int) -> None:
        # Some servers do not tell. vLLM samples a token after the row whatever it is asked for, and wants room for it.
        limit = self._models[url].get("max_model_len")
        if limit is not None and longest >= limit:
            raise ValueError(
                f"{self._key}: {url} reads up to {limit} tokens (max_model_len), and is to be sent rows of up to"
                f" {longest} (data.max_prompt_length + actor_rollout_ref.rollout.max_new_tokens), with room for one"
                f" more. Serve it with --max-model-len {longest + 1} or more, or shorten data.max_prompt_length or"
                " data.max_response_length."
            )

    def _fill(self, row: int, ids: list[int], places: list[Any], found: Mapping[str, torch.Tensor]) -> None:
        told = [place[str(token)]["logprob"] for token, place in zip(ids, places, strict=True)]
        found["teacher_log_prob"][row, : len(ids)] = torch.tensor(told)
        if not self._top_k or not ids:
            return
        likeliest = [
            sorted(((said["logprob"], int(name)) for name, said in place.items()), reverse=True)[: self._top_k]
            for place in places
        ]
        fewest = min(map(len, likeliest))
        if fewest < self._top_k:
            raise ValueError(
                f"{self._key}: asked for the {self._top_k} likeliest tokens, the server told {fewest}."
                " Lower distillation.distillation_loss.topk, or let it tell more (vllm serve --max-logprobs)."
            )
        values = torch.from_numpy(np.array(likeliest))  # float64, in which token ids are exact, too
        found["teacher_top_log_probs"][row, : len(ids)] = values[..., 0].float()
        found["teacher_top_ids"][row, : len(ids)] = values[..., 1].int()

    async def _ask_all(self, rows: Sequence[list[int]], url: str | None = None) -> list[list[Any]]:
        """What is said of every row, in order; rows go to the servers in turn."""
        import httpx

        limit = asyncio.Semaphore(_AT_ONCE * len(self._urls))
        # The servers are named by their addresses; proxies of the environment are for the outside.
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30), trust_env=False) as http:
            for each in [url] if url else self._urls:
                if each not in self._models:
                    self._models[each] = (await self._replied(http, each, "/v1/models", None))["data"][0]

            async def ask(at: str, ids: list[int]) -> list[Any]:
                asked = {
                    "model": self._models[at]["id"],
                    "prompt": ids,
                    "max_tokens": 1,
                    "prompt_logprobs": self._top_k,
                }
                async with limit:
                    reply = await self._replied(http, at, "/v1/completions", asked)
                return reply["choices"][0]["prompt_logprobs"]

            turns = itertools.cycle([url] if url else self._urls)
            return list(await asyncio.gather(*(ask(at, ids) for at, ids in zip(turns, rows, strict=False))))

    async def _replied(self, http: Any, url: str, path: str, asked: dict[str, Any] | None) -> Any:
        """A server that cannot be reached, or has too much to do, is asked again a few times."""
        remedy = ". Start it (python -m verl.inference.server --model …, or vllm serve), or correct the address."
        return await request_json(http, self._key, url + path, asked, remedy)
