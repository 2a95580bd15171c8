"""Paged attention: the interface of backends, and a backend in plain torch for CPUs and as reference.

TorchAttention is exact on every device and optimised for few CPU cores: prompts of similar length are one padded batch,
and so are decodes, whose blocks are gathered first. Later chunks of prompts are computed one by one. The layout of a
forward pass is computed once and used in all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["AttentionBackend", "AttentionStep", "LayerKVCache", "TorchAttention"]

LayerKVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim], contiguous."""


class AttentionBackend(Protocol):
    """Paged attention by one set of kernels."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: AttentionStep,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write key and value into the layer's cache at `step.slots`, then attend causally.

        query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim]; returns [T, heads, head_dim].
        A token sees itself and the `window - 1` tokens before it (None: all). With `softcap`, scores are
        softcap·tanh(score/softcap).
        """
        ...


@dataclass(slots=True)
class AttentionStep:
    """The layout of one forward pass over T tokens: packed prefill chunks first, then the decodes."""

    kv_cache: list[LayerKVCache]
    """One pair per layer."""
    backend: AttentionBackend
    slots: torch.Tensor
    """[T] int64: cache slot of each token, block * block_size + offset."""
    num_prefill_tokens: int
    query_starts: torch.Tensor
    """[P + 1] int32: where each prefill chunk starts among the tokens."""
    prefill_lengths: torch.Tensor
    """[P] int32: KV length of each prefilled sequence after its chunk."""
    prefill_tables: torch.Tensor
    """[P, W] int32: block tables of the prefilled sequences."""
    decode_lengths: torch.Tensor
    """[D] int32: KV length of each decoded sequence, including its input token."""
    decode_tables: torch.Tensor
    """[D, W] int32: block tables of the decoded sequences."""
    unused_adapters: torch.Tensor | None = None
    """[T, adapter slots, 1]: see `AdapterGroup.product`."""
    scratch: dict[Any, Any] = field(default_factory=dict)
    """Values that a backend computes once for all layers of this pass."""


# A call costs about as much as this many padding tokens: a batch with more padding is split.
TOKENS_PER_CALL = 400
# Elements of one block of materialised scores (soft-capping): 64 MB in float32.
SCORE_ELEMENTS = 2**24


class TorchAttention:
    """An AttentionBackend in plain torch."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: AttentionStep,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        keys, values = step.kv_cache[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, step.slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, step.slots, value)
        layout = step.scratch.get((TorchAttention, window))
        if layout is None:
            layout = step.scratch[TorchAttention, window] = _Layout(step, window, query.dtype)
        out = query.new_empty(query.shape)
        for batch in layout.prompts:
            out[batch.rows] = _attend_prompts(batch, query, key, value, scale, softcap)
        for chunk in layout.chunks:
            out[chunk.rows] = _attend_chunk(chunk, query, (keys, values), scale, softcap)
        for bucket in layout.buckets:
            out[bucket.rows] = _attend_bucket(bucket, query, (keys, values), scale, softcap)
        return out


@dataclass(slots=True)
class _Prompts:
    """Whole prompts of similar length, attended without the cache."""

    rows: torch.Tensor
    """[tokens] indices of their tokens in the pass, prompt after prompt."""
    padded: torch.Tensor
    """[n * longest] the same indices, padded to the longest prompt. The padding repeats the index of the prompt's first
    token; it comes after the prompt, where causal attention ignores it."""
    places: torch.Tensor
    """[tokens] positions of `rows` in `padded`."""
    count: int
    bias: torch.Tensor | None
    """[1, 1, longest, longest], 0 or -inf; None: causal."""


@dataclass(slots=True)
class _Chunk:
    """A later chunk of a prompt."""

    rows: slice
    """Indices of its tokens in the pass."""
    blocks: torch.Tensor
    """Blocks of its visible context."""
    length: int
    """Number of valid tokens in those blocks."""
    bias: torch.Tensor
    """[1, 1, queries, length], 0 or -inf."""


@dataclass(slots=True)
class _Bucket:
    """Decoded sequences of similar length."""

    rows: torch.Tensor
    """[n] indices of their tokens in the pass."""
    blocks: torch.Tensor
    """[n * w] their blocks, w per sequence."""
    length: int
    """Length of the longest."""
    bias: torch.Tensor | None
    """[n, 1, 1, length], -inf at masked positions; None: no mask."""
    masked: torch.Tensor | None
    """[m] masked positions among all n * w * block_size."""


class _Layout:
    """Prompts, chunks and buckets of one forward pass, for one window size."""

    def __init__(self, step: AttentionStep, window: int | None, dtype: torch.dtype) -> None:
        self.block_size = step.kv_cache[0][0].shape[1]
        self.window = window
        self.dtype = dtype
        self.device = step.slots.device
        starts, lengths = step.query_starts.tolist(), step.prefill_lengths.tolist()
        whole = [i for i, length in enumerate(lengths) if starts[i + 1] - starts[i] == length]
        self.prompts = [self._prompts(starts, lengths, members) for members in _group_by_length(lengths, whole)]
        self.chunks = list(self._chunks(step, starts, lengths))
        self.buckets = list(self._buckets(step))

    def _prompts(self, starts: list[int], lengths: list[int], members: list[int]) -> _Prompts:
        """`members` are prompts, the longest first."""
        longest = lengths[members[0]]
        first = torch.tensor([starts[i] for i in members], device=self.device).unsqueeze(1)
        size = torch.tensor([lengths[i] for i in members], device=self.device).unsqueeze(1)
        place = torch.arange(longest, device=self.device).expand(len(members), -1)
        padded = (first + torch.where(place < size, place, 0)).flatten()
        places = (place < size).flatten().nonzero().flatten()
        windowed = self.window is not None and self.window < longest
        bias = self._bias(0, longest, 0, longest) if windowed else None
        return _Prompts(padded[places], padded, places, len(members), bias)

    def _chunks(self, step: AttentionStep, starts: list[int], lengths: list[int]) -> Iterator[_Chunk]:
        for i, length in enumerate(lengths):
            rows = slice(starts[i], starts[i + 1])
            queries = rows.stop - rows.start
            first = length - queries
            if first == 0:
                continue
            first_block = 0 if self.window is None else max(0, first - self.window + 1) // self.block_size
            blocks = step.prefill_tables[i, first_block : -(-length // self.block_size)]
            origin = first_block * self.block_size
            yield _Chunk(rows, blocks, length - origin, self._bias(first, queries, origin, length))

    def _bias(self, first: int, queries: int, origin: int, length: int) -> torch.Tensor:
        """[1, 1, queries, length - origin]: mask of keys from `origin` on for queries from position `first` on."""
        query = torch.arange(first, first + queries, device=self.device).unsqueeze(1)
        key = torch.arange(origin, length, device=self.device)
        hidden = key > query
        if self.window is not None:
            hidden |= key <= query - self.window
        return _mask_bias(hidden, self.dtype)[None, None]

    def _buckets(self, step: AttentionStep) -> Iterator[_Bucket]:
        lengths = step.decode_lengths.tolist()
        if self.window is None:
            skipped = [0] * len(lengths)
        else:
            skipped = [max(0, length - self.window) // self.block_size for length in lengths]
        spans = [length - skip * self.block_size for length, skip in zip(lengths, skipped, strict=True)]
        for members in _group_by_length(spans, range(len(spans))):
            yield self._bucket(step, members, [skipped[m] for m in members], spans[members[0]])

    def _bucket(self, step: AttentionStep, members: list[int], skipped: list[int], longest: int) -> _Bucket:
        rows = torch.tensor(members, device=self.device)
        skip = torch.tensor(skipped, device=self.device).unsqueeze(1)
        columns = skip + torch.arange(-(-longest // self.block_size), device=self.device)
        tables = step.decode_tables.index_select(0, rows)
        blocks = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
        places = torch.arange(columns.shape[1] * self.block_size, device=self.device)
        positions = skip * self.block_size + places
        lengths = step.decode_lengths.index_select(0, rows).unsqueeze(1)
        masked = positions >= lengths
        if self.window is not None:
            masked |= positions < lengths - self.window
        hidden = masked[:, :longest]
        bias = _mask_bias(hidden, self.dtype)[:, None, None] if bool(hidden.any()) else None
        where = None if bias is None else masked.flatten().nonzero().flatten()
        return _Bucket(rows + step.num_prefill_tokens, blocks.flatten(), longest, bias, where)


def _group_by_length(lengths: Sequence[int], members: Iterable[int]) -> Iterator[list[int]]:
    """Group `members` by similar length, longest first, while padding costs less than one more call."""
    group: list[int] = []
    padding = 0
    for i in sorted(members, key=lambda i: -lengths[i]):
        padding += lengths[group[0]] - lengths[i] if group else 0
        if padding > TOKENS_PER_CALL:
            yield group
            group, padding = [], 0
        group.append(i)
    if group:
        yield group


def _attend_prompts(
    batch: _Prompts, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention of whole prompts, [tokens, heads, head_dim]."""
    parts = (part.index_select(0, batch.padded) for part in (query, key, value))
    queries, keys, values = (part.unflatten(0, (batch.count, -1)).transpose(1, 2) for part in parts)
    out = _attend(queries, keys, values, batch.bias, batch.bias is None, scale, softcap)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, batch.places)


def _attend_chunk(
    chunk: _Chunk,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one chunk to its visible context, [queries, heads, head_dim]."""
    context = (part.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.length] for part in cache)
    keys, values = (part.transpose(0, 1).unsqueeze(0) for part in context)
    queries = query[chunk.rows].transpose(0, 1).unsqueeze(0)
    return _attend(queries, keys, values, chunk.bias, False, scale, softcap)[0].transpose(0, 1)


def _attend_bucket(
    bucket: _Bucket,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of decoded tokens to their cached context, [n, heads, head_dim].

    The query heads of a KV head are rows of one matrix, so that keys are not repeated.
    """
    n, (kv_heads, head_dim) = len(bucket.rows), cache[0].shape[2:]
    gathered = []
    for part in cache:
        context = part.index_select(0, bucket.blocks)
        if bucket.masked is not None:
            # Unused memory may contain NaN, and 0 · NaN is NaN.
            context.view(-1, kv_heads * head_dim).index_fill_(0, bucket.masked, 0)
        gathered.append(context.view(n, -1, kv_heads, head_dim)[:, : bucket.length].transpose(1, 2))
    queries = query.index_select(0, bucket.rows).view(n, kv_heads, -1, head_dim)
    bias = None if bucket.bias is None else bucket.bias.expand(-1, -1, queries.shape[2], -1)
    keys, values = gathered
    return _attend(queries, keys, values, bias, False, scale, softcap).reshape(n, -1, head_dim)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """query [n, heads, q, dim], key and value [n, kv_heads, s, dim] → [n, heads, q, dim]."""
    if softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    n, heads, count, dim = query.shape
    grouped = query.reshape(n, key.shape[1], -1, count, dim)
    rows = max(1, SCORE_ELEMENTS // (n * heads * key.shape[2]))
    if causal:
        hidden = torch.ones(count, key.shape[2], dtype=torch.bool, device=query.device).triu_(1)
        bias = _mask_bias(hidden, query.dtype)[None, None]
    parts = []
    for start in range(0, count, rows):
        scores = torch.matmul(grouped[..., start : start + rows, :], key.unsqueeze(2).transpose(-1, -2)).float()
        scores = torch.tanh(scores * (scale / softcap)) * softcap
        if bias is not None:
            scores += bias[..., start : start + rows, :].unsqueeze(2)
        parts.append(torch.matmul(scores.softmax(dim=-1).to(value.dtype), value.unsqueeze(2)))
    return torch.cat(parts, dim=-2).view(n, heads, count, dim)


def _mask_bias(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """-inf where `hidden` is true, otherwise 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
