"""LLMGenerationManager: search turns for a whole batch at a time, as scripts of Search-R1 call it.

All rows take a turn together, on a worker group's `generate_sequences`; the slowest row holds the others up, which
`do_search=True` (`search_loop`) does not. Tokens and masks are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.agent.search_protocol import STOPS, Action, Information, parse_action
from verl.protocol import DataProto, object_array, pad_dataproto_to_divisor, unpad_dataproto
from verl.search.client import RetrieverClient, RetrieverError
from verl.search.retriever import Hit
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.model import compute_position_id_with_mask
from verl.workers.rollout.output import rows_from_trajectories

__all__ = ["GenerationConfig", "LLMGenerationManager"]


@dataclass
class GenerationConfig:
    """Lengths in tokens: of the first prompt, of all that precedes the last turn, of one turn, of one observation."""

    max_turns: int
    max_start_length: int
    max_prompt_length: int
    max_response_length: int
    max_obs_length: int
    num_gpus: int = 1
    no_think_rl: bool = False
    search_url: str | None = None
    topk: int = 3
    start_state_marker: str = "<information>"
    end_state_marker: str = "</information>"


@dataclass
class _Conversation:
    """A row on its way."""

    row: Row
    turns: int = 0
    valid: int = 0
    searches: int = 0
    active: bool = True

    @property
    def ids(self) -> list[int]:
        return [*self.row.prompt_ids, *(token for turn in self.row.turns for token in turn.token_ids)]


@dataclass
class LLMGenerationManager:
    """Runs turns on `actor_rollout_wg` until every row has answered, or `max_turns` searches and one turn are over."""

    tokenizer: Any
    actor_rollout_wg: Any
    config: GenerationConfig
    is_validation: bool = False
    _counts: Counter[str] = field(default_factory=Counter, repr=False)

    def run_llm_loop(self, gen_batch: DataProto, initial_input_ids: torch.Tensor) -> DataProto:
        """The generated batch of `gen_batch`'s prompts; `initial_input_ids` [batch, prompt] are their last tokens.

        Besides the columns of every generation it has `info_mask` [batch, prompt + response], 0 on what the
        environment wrote (and on padding). meta_info has `turns_stats`, `active_mask`, `valid_action_stats` and
        `valid_search_stats`, a number per row, and `search_failures`.
        """
        self._counts.clear()
        rows = [_Conversation(Row(ids, [])) for ids in self._prompts(gen_batch, initial_input_ids)]
        told = Information(
            self.tokenizer, self.config.start_state_marker, self.config.end_state_marker, self.config.max_obs_length
        )
        for left in range(self.config.max_turns, -1, -1):
            active = [row for row in rows if row.active]
            if not active:
                break
            self._turn(active, gen_batch.meta_info)
            self._reply([row for row in active if row.active], told, last=left == 0)
        return self._finished(rows, gen_batch)

    def _create_loss_mask(self, batch: DataProto, metrics: dict[str, Any]) -> tuple[DataProto, dict[str, Any]]:
        """Adds `loss_mask` [batch, response], 1 on tokens that the model sampled, and says how much that is."""
        length = batch.batch["responses"].shape[1]
        there = batch.batch["attention_mask"][:, -length:]
        mask = batch.batch["info_mask"][:, -length:] * there
        batch.batch["loss_mask"] = mask
        total = int(mask.sum())
        metrics |= {"state_tokens/total": total, "state_tokens/coverage": total / max(1, int(there.sum()))}
        return batch, metrics

    def _prompts(self, gen_batch: DataProto, initial_input_ids: torch.Tensor) -> list[list[int]]:
        """The last `max_start_length` tokens of every prompt."""
        width = initial_input_ids.shape[1]
        masks = gen_batch.batch["attention_mask"][:, -width:].bool()
        prompts = [ids[mask].tolist() for ids, mask in zip(initial_input_ids, masks, strict=True)]
        return [prompt[-self.config.max_start_length :] for prompt in prompts]

    def _turn(self, active: Sequence[_Conversation], meta_info: dict[str, Any]) -> None:
        """One turn of the model for every row; a row without room for one ends."""
        asked = _left_padded([row.ids for row in active], self.tokenizer.pad_token_id)
        stops = dict.fromkeys([*(meta_info.get("stop") or ()), *STOPS])
        asked.meta_info = meta_info | {"stop": list(stops), "max_new_tokens": self.config.max_response_length}
        if self.is_validation:
            asked.meta_info["validate"] = True
        padded, fillers = pad_dataproto_to_divisor(asked, self.actor_rollout_wg.world_size)
        answers = unpad_dataproto(self.actor_rollout_wg.generate_sequences(padded), fillers)
        masks = answers.batch["response_mask"].bool()
        for number, row in enumerate(active):
            here = masks[number]
            columns = {
                name: answers.batch[name][number][here].tolist() for name in _SAID.values() if name in answers.batch
            }
            said = {ours: columns[name] for ours, name in _SAID.items() if name in columns}
            reason = answers.non_tensor_batch["finish_reason"][number]
            row.row.turns.append(Turn("model", **said, finish_reason=reason))
            row.turns += 1
            row.active = reason != "abort"

    def _reply(self, active: Sequence[_Conversation], told: Information, last: bool) -> None:
        """What every row that goes on is told; all searches of a turn are one request."""
        actions = [parse_action(self.tokenizer.decode(row.row.turns[-1].token_ids)) for row in active]
        for row, action in zip(active, actions, strict=True):
            row.valid += action.kind != "invalid"
            row.active = not last and action.kind != "answer"
        found = iter(self._search([action.content for action in _going_on(active, actions) if action.kind == "search"]))
        for row, action in zip(active, actions, strict=True):
            if not row.active:
                continue
            row.searches += action.kind == "search"
            hits = next(found) if action.kind == "search" else None
            reply = told.invalid() if action.kind == "invalid" else told.failed() if hits is None else told.of(hits)
            if len(row.ids) + len(reply) > self.config.max_prompt_length:
                row.active = False  # no room for a turn that would have read it
                row.row.turns[-1].finish_reason = "length"
            else:
                row.row.turns.append(Turn("environment", reply))

    def _search(self, queries: list[str]) -> list[list[Hit] | None]:
        """The documents of every query; None for one that failed, which costs its own turn."""
        if not queries:
            return []
        if self.config.search_url is None:
            raise ValueError("GenerationConfig.search_url: a row searches, and there is nothing to ask. Set it.")
        # A thread of its own: the caller may be in an event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self._ask(queries))).result()

    async def _ask(self, queries: list[str]) -> list[list[Hit] | None]:
        assert self.config.search_url is not None
        client = RetrieverClient(self.config.search_url)
        try:
            tasks = (client.retrieve([query], self.config.topk) for query in queries)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await client.close()
        found: list[list[Hit] | None] = []
        for answer in answers:
            if isinstance(answer, RetrieverError):
                self._counts["failures"] += 1
            elif isinstance(answer, BaseException):
                raise answer
            found.append(None if isinstance(answer, BaseException) else answer[0])
        return found

    def _finished(self, rows: Sequence[_Conversation], gen_batch: DataProto) -> DataProto:
        batch = rows_from_trajectories(
            [Trajectory(str(number), 0, [row.row]) for number, row in enumerate(rows)], self.tokenizer.pad_token_id
        )
        batch.pop(non_tensor_batch_keys=["uid", "sample_index", "trajectory"])
        prompt = batch.batch["attention_mask"][:, : -batch.batch["responses"].shape[1]]
        batch.batch["info_mask"] = torch.cat([prompt, batch.batch["response_mask"]], dim=1)
        batch.meta_info = gen_batch.meta_info | {
            "turns_stats": [row.turns for row in rows],
            "active_mask": [row.active for row in rows],
            "valid_action_stats": [row.valid for row in rows],
            "valid_search_stats": [row.searches for row in rows],
            "search_failures": self._counts["failures"],
        }
        return batch


_SAID = {"token_ids": "responses", "log_probs": "rollout_log_probs", "versions": "rollout_versions"}


def _going_on(rows: Sequence[_Conversation], actions: Sequence[Action]) -> list[Action]:
    return [action for row, action in zip(rows, actions, strict=True) if row.active]


def _left_padded(contexts: Sequence[Sequence[int]], pad: int) -> DataProto:
    """Prompts of a generation. Noise goes by the context and the number of equal ones before it."""
    width = max(map(len, contexts))
    ids = torch.tensor([[pad] * (width - len(context)) + list(context) for context in contexts])
    mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
    names = [hashlib.blake2b(np.asarray(context).tobytes(), digest_size=16).hexdigest() for context in contexts]
    seen: Counter[str] = Counter()
    numbers = []
    for name in names:
        numbers.append(seen[name])
        seen[name] += 1
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": compute_position_id_with_mask(mask)}
    return DataProto.from_dict(tensors, {"uid": object_array(names), "sample_index": object_array(numbers)})
