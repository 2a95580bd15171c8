"""Prefill and decode on a transformers model: the running sequences are the rows of one left-padded KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from verl.inference.sequence import Sequence
from verl.inference.step_plan import banned_tokens
from verl.inference.token_sampling import SamplingBatch, sample_tokens

__all__ = ["HFRunner"]

# A finished row costs compute until it is removed, removing costs a copy of the cache: remove when this share is done.
_COMPACT_SHARE = 0.25
_GROWTH_COLUMNS = 64

# Who, the token, and its log-prob at the row's temperature, raw, and as drawn.
Sampled = list[tuple[Sequence, int, float, float, float]]


class HFRunner:
    """The batch that is decoded: one row per sequence, its cache right-aligned so that all append at the same column.

    A row's cache holds all of its tokens but the last, which the next `decode` feeds.
    """

    def __init__(self, model: Any, max_batched_tokens: int) -> None:
        self._model = model
        self._device = torch.device(model.device)
        self._max_batched_tokens = max_batched_tokens
        last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._head_options: dict[str, Any] = {"logits_to_keep": 1} if last_only else {}
        self.clear()

    def clear(self) -> None:
        """Forget all rows and their KV."""
        self._rows: list[Sequence | None] = []
        self._cache: Cache | None = None

    # Made by `_rebuild`: tokens in each row's cache [rows], the token each row feeds next [rows], valid columns of the
    # cache [rows, columns], and how each row is sampled.
    _cached: torch.Tensor
    _last_tokens: torch.Tensor
    _mask: torch.Tensor
    _batch: SamplingBatch

    @torch.inference_mode()
    def prefill(self, joining: SequenceOf[Sequence]) -> Sampled:
        """Run the tokens these sequences have and add their rows; the next token of each."""
        if self._device.type == "cuda":
            # A new thread starts on device 0; every batch starts here.
            torch.cuda.set_device(self._device)
        rows = [row for row in self._rows if row is not None]
        cached, last_tokens = [len(row) - 1 for row in rows], [row.output.token_ids[-1] for row in rows]
        parts = [] if self._cache is None else [(self._cache, self._live_rows())]
        sampled: Sampled = []
        for chunk in self._chunks(joining):
            cache, owner, logits = self._run_prompts([sequence.token_ids for sequence in chunk])
            batch = SamplingBatch.of([sequence.request.params for sequence in chunk], self._device)
            lengths = [len(sequence) for sequence in chunk]
            new = self._sample(logits.index_select(0, owner), chunk, batch, self._tensor(lengths))
            sampled += new
            parts.append((cache, owner))
            rows += chunk
            cached += lengths
            last_tokens += [token for _, token, *_ in new]
        self._rebuild(parts, rows, cached, last_tokens)
        return sampled

    @torch.inference_mode()
    def decode(self) -> Sampled:
        """One token for every row."""
        self._mask = pad(self._mask, (0, 1), value=1)
        logits = self._model(
            input_ids=self._last_tokens.unsqueeze(1),
            attention_mask=self._mask,
            position_ids=self._cached.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
            **self._head_options,
        ).logits[:, -1]
        self._cached = self._cached + 1
        return self._sample(logits, self._rows, self._batch, self._cached)

    def leave(self, leaving: SequenceOf[Sequence]) -> None:
        """Their rows die; dead rows are removed once that is worth a copy."""
        gone = set(leaving)
        self._rows = [None if row in gone else row for row in self._rows]
        live = [row for row in self._rows if row is not None]
        if not live:
            self.clear()
        elif self._cache is not None and len(self._rows) - len(live) >= _COMPACT_SHARE * len(self._rows):
            parts = [(self._cache, self._live_rows())]
            self._rebuild(parts, live, [len(row) - 1 for row in live], [row.output.token_ids[-1] for row in live])

    def _sample(
        self, logits: torch.Tensor, rows: SequenceOf[Sequence | None], batch: SamplingBatch, positions: torch.Tensor
    ) -> Sampled:
        """A token for each row of `logits` [rows, vocab]; dead rows are computed along and left out."""
        live = [(index, row) for index, row in enumerate(rows) if row is not None]
        banned = banned_tokens((index, row.request.params, len(row.output.token_ids)) for index, row in live)
        drawn = sample_tokens(logits, batch, positions, banned)
        self._last_tokens = drawn.tokens
        columns = [column.tolist() for column in drawn]
        return [(row, *values) for row, *values in zip(rows, *columns, strict=True) if row is not None]

    def _run_prompts(self, prompts: list[list[int]]) -> tuple[Cache, torch.Tensor, torch.Tensor]:
        """Equal prompts are computed once. Returns their cache, which of its rows each prompt owns [prompts], and the
        logits after the last token [distinct, vocab]."""
        distinct = {tokens: row for row, tokens in enumerate(dict.fromkeys(map(tuple, prompts)))}
        owner = self._tensor([distinct[tuple(tokens)] for tokens in prompts])
        width = max(len(tokens) for tokens in distinct)
        input_ids = torch.tensor([[0] * (width - len(t)) + list(t) for t in distinct], device=self._device)
        mask = _left_padded_mask(self._tensor([len(tokens) for tokens in distinct]), width)
        cache = DynamicCache()
        logits = self._model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp_(min=0),
            past_key_values=cache,
            use_cache=True,
            **self._head_options,
        ).logits[:, -1]
        return cache, owner, logits

    @torch.inference_mode()
    def _rebuild(
        self,
        parts: SequenceOf[tuple[Cache, torch.Tensor]],
        rows: SequenceOf[Sequence],
        cached: list[int],
        last_tokens: list[int],
    ) -> None:
        """One batch of the chosen rows of each cache, right-aligned, no wider than the longest row."""
        width = max(cached)
        chosen = [index for _, index in parts]
        layers = zip(*(cache.layers for cache, _ in parts), strict=True)
        self._cache = Cache(layers=[_GrowingLayer.joined(layer, chosen, width) for layer in layers])
        self._rows = list(rows)
        self._cached = self._tensor(cached)
        self._last_tokens = self._tensor(last_tokens)
        self._mask = _left_padded_mask(self._cached, width)
        self._batch = SamplingBatch.of([row.request.params for row in rows], self._device)

    def _chunks(self, joining: SequenceOf[Sequence]) -> Iterator[list[Sequence]]:
        """Sequences of similar length together, at most `max_batched_tokens` of padded input at a time."""
        chunk: list[Sequence] = []
        for sequence in sorted(joining, key=len):
            if chunk and (len(chunk) + 1) * len(sequence) > self._max_batched_tokens:
                yield chunk
                chunk = []
            chunk.append(sequence)
        if chunk:
            yield chunk

    def _live_rows(self) -> torch.Tensor:
        return self._tensor([index for index, row in enumerate(self._rows) if row is not None])

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class _GrowingLayer(DynamicLayer):
    """Keys and values with room to grow: a new token is written beside the old ones, which stay where they are."""

    keys: torch.Tensor
    values: torch.Tensor
    _key_room: torch.Tensor
    _value_room: torch.Tensor

    @classmethod
    def joined(cls, layers: SequenceOf[Any], rows: SequenceOf[torch.Tensor], width: int) -> _GrowingLayer:
        """The last `width` columns of the chosen `rows` of each layer, shorter ones padded on the left."""
        self = cls()
        self.lazy_initialization(layers[0].keys, layers[0].values)
        self._key_room = _stacked([layer.keys for layer in layers], rows, width)
        self._value_room = _stacked([layer.values for layer in layers], rows, width)
        self.keys, self.values = self._key_room[..., :width, :], self._value_room[..., :width, :]
        return self

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        used = self.keys.shape[-2]
        needed = used + key_states.shape[-2]
        if needed > self._key_room.shape[-2]:
            more = needed - used + max(_GROWTH_COLUMNS, used // 4)
            self._key_room, self._value_room = pad(self.keys, (0, 0, 0, more)), pad(self.values, (0, 0, 0, more))
        self._key_room[..., used:needed, :] = key_states
        self._value_room[..., used:needed, :] = value_states
        self.keys, self.values = self._key_room[..., :needed, :], self._value_room[..., :needed, :]
        return self.keys, self.values


def _stacked(states: SequenceOf[torch.Tensor], rows: SequenceOf[torch.Tensor], width: int) -> torch.Tensor:
    """`states` [batch, heads, columns, dim] each → the chosen rows of all, [rows, heads, width + room, dim]."""
    total = sum(len(index) for index in rows)
    _, heads, _, dim = states[0].shape
    stacked = states[0].new_zeros(total, heads, width + _GROWTH_COLUMNS, dim)
    start = 0
    for state, index in zip(states, rows, strict=True):
        columns = min(width, state.shape[-2])
        target = stacked[start : start + len(index), :, width - columns : width]
        target.copy_(state[..., state.shape[-2] - columns :, :].index_select(0, index))
        start += len(index)
    return stacked


def _left_padded_mask(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """[rows] → [rows, width], 1 on the last `lengths` columns."""
    return (torch.arange(width, device=lengths.device) >= width - lengths.unsqueeze(1)).to(torch.int64)
