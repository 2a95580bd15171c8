"""LLMGenerationManager: search turns for a whole batch, with the interface of scripts of Search-R1 (arXiv 2503.09516).

All rows generate a turn together, in one call of the worker group's `generate_sequences`: each turn takes as long as
its slowest row. `do_search=True` (`SearchAgentLoop`) produces the same tokens and masks, but rows do not wait for each
other.
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

from verl.agent.search_loop import STOPS, ObservationEncoder, parse_action
from verl.protocol import DataProto, object_array, pad_dataproto_to_divisor, unpad_dataproto
from verl.search.client import RetrieverClient, RetrieverError
from verl.search.retriever import Hit
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.model import compute_position_id_with_mask
from verl.workers.rollout.training_rows import rows_from_trajectories

__all__ = ["GenerationConfig", "LLMGenerationManager"]


@dataclass
class GenerationConfig:
    """Limits and retriever, with the field names of Search-R1. Lengths are in tokens.

    `max_start_length` limits the prompt, `max_prompt_length` the context of a turn, `max_response_length` a turn of the
    model and `max_obs_length` a search result. `num_gpus` and `no_think_rl` have no effect.
    """

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
    """A row while it is generated."""

    row: Row
    turns: int = 0
    """Number of turns of the model."""
    valid_actions: int = 0
    searches: int = 0
    active: bool = True
    """Whether another turn is generated."""
    answered: bool = False

    @property
    def token_ids(self) -> list[int]:
        """The prompt and all turns."""
        return [*self.row.prompt_ids, *(token for turn in self.row.turns for token in turn.token_ids)]


@dataclass
class LLMGenerationManager:
    """Generates turns with `actor_rollout_wg` until all rows have an answer: at most `max_turns` turns that may
    search, and a last one whose search is not executed."""

    tokenizer: Any
    actor_rollout_wg: Any
    config: GenerationConfig
    is_validation: bool = False
    _search_failures: int = field(default=0, repr=False)

    def run_llm_loop(self, gen_batch: DataProto, initial_input_ids: torch.Tensor) -> DataProto:
        """Generate responses for the prompts of `gen_batch`; `initial_input_ids` [batch, prompt] are their last tokens.

        The result has the columns of `generate_sequences` and `info_mask` [batch, prompt + response], 0 on tokens of
        the environment and on padding. Its meta_info has `turns_stats`, `active_mask`, `valid_action_stats` and
        `valid_search_stats` (one value per row) and `search_failures`. A row without an answer stays in `active_mask`:
        scripts compute the share of finished rows from it.
        """
        self._search_failures = 0
        conversations = [_Conversation(Row(ids, [])) for ids in self._prompts(gen_batch, initial_input_ids)]
        encoder = ObservationEncoder(
            self.tokenizer, self.config.start_state_marker, self.config.end_state_marker, self.config.max_obs_length
        )
        for searches_left in range(self.config.max_turns, -1, -1):
            active = [conversation for conversation in conversations if conversation.active]
            if not active:
                break
            self._generate_turn(active, gen_batch.meta_info)
            continuing = [conversation for conversation in active if conversation.active]
            self._add_observations(continuing, encoder, last=searches_left == 0)
        return self._to_batch(conversations, gen_batch)

    def _create_loss_mask(self, batch: DataProto, metrics: dict[str, Any]) -> tuple[DataProto, dict[str, Any]]:
        """Add `loss_mask` [batch, response], 1 on sampled tokens, to the batch and its coverage to the metrics."""
        length = batch.batch["responses"].shape[1]
        attention = batch.batch["attention_mask"][:, -length:]
        mask = batch.batch["info_mask"][:, -length:] * attention
        batch.batch["loss_mask"] = mask
        total = int(mask.sum())
        metrics |= {"state_tokens/total": total, "state_tokens/coverage": total / max(1, int(attention.sum()))}
        return batch, metrics

    def _prompts(self, gen_batch: DataProto, initial_input_ids: torch.Tensor) -> list[list[int]]:
        """Return the token ids of the prompts without padding, at most the last `max_start_length` of each."""
        width = initial_input_ids.shape[1]
        masks = gen_batch.batch["attention_mask"][:, -width:].bool()
        prompts = [ids[mask].tolist() for ids, mask in zip(initial_input_ids, masks, strict=True)]
        return [prompt[-self.config.max_start_length :] for prompt in prompts]

    def _generate_turn(self, active: Sequence[_Conversation], meta_info: dict[str, Any]) -> None:
        """Generate one turn of every row; aborted rows become inactive."""
        prompts = _left_padded([conversation.token_ids for conversation in active], self.tokenizer.pad_token_id)
        stops = dict.fromkeys([*(meta_info.get("stop") or ()), *STOPS])
        prompts.meta_info = meta_info | {"stop": list(stops), "max_new_tokens": self.config.max_response_length}
        if self.is_validation:
            prompts.meta_info["validate"] = True
        padded, num_padding_rows = pad_dataproto_to_divisor(prompts, self.actor_rollout_wg.world_size)
        responses = unpad_dataproto(self.actor_rollout_wg.generate_sequences(padded), num_padding_rows)
        masks = responses.batch["response_mask"].bool()
        for number, conversation in enumerate(active):
            fields = {
                field_name: responses.batch[column][number][masks[number]].tolist()
                for field_name, column in _TURN_COLUMNS.items()
                if column in responses.batch
            }
            reason = responses.non_tensor_batch["finish_reason"][number]
            conversation.row.turns.append(Turn("model", **fields, finish_reason=reason))
            conversation.turns += 1
            conversation.active = reason != "abort"

    def _add_observations(self, active: Sequence[_Conversation], encoder: ObservationEncoder, last: bool) -> None:
        """Append the observation of every row that continues. All searches of a turn are sent together."""
        actions = [parse_action(self.tokenizer.decode(conversation.row.turns[-1].token_ids)) for conversation in active]
        for conversation, action in zip(active, actions, strict=True):
            conversation.valid_actions += action.kind != "invalid"
            conversation.answered = action.kind == "answer"
            conversation.active = not last and not conversation.answered
        continued = [pair for pair in zip(active, actions, strict=True) if pair[0].active]
        results = iter(self._search([action.content for _, action in continued if action.kind == "search"]))
        for conversation, action in continued:
            if action.kind == "invalid":
                observation = encoder.invalid_action()
            else:
                conversation.searches += 1
                hits = next(results)
                observation = encoder.search_failed() if hits is None else encoder.documents(hits)
            if len(conversation.token_ids) + len(observation) > self.config.max_prompt_length:
                conversation.active = False  # no tokens left for a turn that reads the observation
                conversation.row.turns[-1].finish_reason = "length"
            else:
                conversation.row.turns.append(Turn("environment", observation))

    def _search(self, queries: list[str]) -> list[list[Hit] | None]:
        """Return the documents of every query; None if its search failed."""
        if not queries:
            return []
        if self.config.search_url is None:
            raise ValueError(
                "GenerationConfig.search_url is not set, but a row searches. Set it to the URL of a retriever."
            )
        # In a new thread, because the caller's thread may have a running event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self._retrieve(queries))).result()

    async def _retrieve(self, queries: list[str]) -> list[list[Hit] | None]:
        assert self.config.search_url is not None
        client = RetrieverClient(self.config.search_url)
        try:
            tasks = (client.retrieve([query], self.config.topk) for query in queries)
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await client.close()
        documents: list[list[Hit] | None] = []
        for result in results:
            if isinstance(result, RetrieverError):
                self._search_failures += 1
                documents.append(None)
            elif isinstance(result, BaseException):
                raise result
            else:
                documents.append(result[0])
        return documents

    def _to_batch(self, conversations: Sequence[_Conversation], gen_batch: DataProto) -> DataProto:
        batch = rows_from_trajectories(
            [Trajectory(str(number), 0, [conversation.row]) for number, conversation in enumerate(conversations)],
            self.tokenizer.pad_token_id,
        )
        batch.pop(non_tensor_batch_keys=["uid", "sample_index", "trajectory"])
        prompt = batch.batch["attention_mask"][:, : -batch.batch["responses"].shape[1]]
        batch.batch["info_mask"] = torch.cat([prompt, batch.batch["response_mask"]], dim=1)
        batch.meta_info = gen_batch.meta_info | {
            "turns_stats": [conversation.turns for conversation in conversations],
            "active_mask": [not conversation.answered for conversation in conversations],
            "valid_action_stats": [conversation.valid_actions for conversation in conversations],
            "valid_search_stats": [conversation.searches for conversation in conversations],
            "search_failures": self._search_failures,
        }
        return batch


# Fields of a Turn and the columns that contain them.
_TURN_COLUMNS = {"token_ids": "responses", "log_probs": "rollout_log_probs", "versions": "rollout_versions"}


def _left_padded(contexts: Sequence[Sequence[int]], pad: int) -> DataProto:
    """Return a batch of prompts. Sampling noise is derived from `uid`, a hash of the context, and `sample_index`, the
    number of equal contexts before it."""
    width = max(map(len, contexts))
    ids = torch.tensor([[pad] * (width - len(context)) + list(context) for context in contexts])
    mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
    uids = [hashlib.blake2b(np.asarray(context).tobytes(), digest_size=16).hexdigest() for context in contexts]
    counts: Counter[str] = Counter()
    indices = []
    for uid in uids:
        indices.append(counts[uid])
        counts[uid] += 1
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": compute_position_id_with_mask(mask)}
    return DataProto.from_dict(tensors, {"uid": object_array(uids), "sample_index": object_array(indices)})
