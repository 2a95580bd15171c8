"""HFRollout: generation with a plain transformers model, for debugging and as the reference for other engines.

The running sequences are the rows of one left-padded KV cache.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from verl.config import ModelConfig, RolloutConfig
from verl.inference.build import default_end_tokens, load_module, read_hf_config
from verl.inference.sampler import SamplingBatch, sample_tokens
from verl.inference.sequence import Sequence, accept_tokens
from verl.inference.step_plan import banned_tokens
from verl.inference.weights import EngineWeights, pack_module
from verl.types.request import Request, check_request
from verl.utils.device import resolve_dtype
from verl.utils.progress import pulse
from verl.workers.rollout import register_rollout
from verl.workers.rollout.embedded_rollout import EmbeddedRollout, request_loop

# A finished row costs compute until it is removed, and removal copies the cache: rows are removed when this share of
# them has finished.
_COMPACT_SHARE = 0.25
# Columns by which the cache grows.
_GROWTH_COLUMNS = 64

SampledTokens = list[tuple[Sequence, int, float, float, float]]
"""Sequence, token, and its log-probs: at the row's temperature, at temperature 1, and as sampled."""


@register_rollout("hf")
class HFRollout(EmbeddedRollout):
    """An engine with its own copy of the model in `dtype` on `device`, decoded by its own thread."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        if config.tensor_model_parallel_size > 1:
            raise ValueError(
                f"tensor_model_parallel_size: {config.tensor_model_parallel_size}, the hf engine runs on one device."
                " Set it to 1."
            )
        device = torch.device(device)
        dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
        hf_config = read_hf_config(model_path, model_config)
        self.model = load_module(model_path, hf_config, model_config, config.load_format, device, dtype)
        if getattr(self.model, "_is_stateful", False):
            raise ValueError(
                f"name: hf cannot decode {type(self.model).__name__}, whose state is not a KV cache. Use another"
                " engine."
            )
        region = pack_module(self.model, device, dtype)
        self.model.eval().requires_grad_(False)
        weights = EngineWeights(self.model.state_dict(), region, dtype, keep=not config.free_weights)
        self.weights = weights.tensors
        """The engine's weights by HF name; read-only."""
        runner = HFRunner(self.model, config.max_num_batched_tokens)
        super().__init__(
            config,
            device,
            dtype,
            loop=request_loop(HFEngine(runner, config.max_num_seqs, config.max_model_len), model_path, model_config),
            weights=weights,
            kv=None,
            eos_token_ids=default_end_tokens(model_path, hf_config, model_config).ids,
            pad_token_id=hf_config.get_text_config(decoder=True).pad_token_id,
        )


class HFEngine:
    """A `StepEngine`: at most `max_sequences` run at a time, in order of arrival. New sequences are prefilled before
    running sequences continue."""

    def __init__(self, runner: HFRunner, max_sequences: int, max_length: int) -> None:
        self.version = 0
        self._runner = runner
        self._max_sequences = max_sequences
        self._max_length = max_length
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    def check(self, request: Request) -> None:
        check_request(request, self._max_length)
        params = request.params
        if params.penalised or params.logit_bias or params.top_log_probs or params.prompt_log_probs:
            raise ValueError(
                f"request {request.id!r}: the hf engine does not support penalties, logit_bias, top_log_probs and"
                " prompt_log_probs. Leave them out, or use rollout.name=native."
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.max_length = min(sequence.max_length, self._max_length)
            self._waiting.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        removed = set(sequences)
        for sequence in removed:
            sequence.done = True
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in removed)
        self._drop(removed)

    def step(self) -> list[Sequence]:
        """Sample one token for waiting sequences, or, if none can start, for all running ones."""
        pulse()
        free = self._max_sequences - len(self._running)
        new_sequences = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        self._running += new_sequences
        sampled = self._runner.prefill(new_sequences) if new_sequences else self._runner.decode()
        rows, tokens, log_probs, raw, as_sampled = (list(column) for column in zip(*sampled, strict=True))
        for sequence in rows:
            sequence.in_flight += 1
        failed = accept_tokens(rows, tokens, log_probs, raw, as_sampled, self.version)
        finished = [sequence for sequence in rows if sequence in failed or sequence.is_finished()]
        self._drop(set(finished))
        return finished

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def in_flight(self) -> bool:
        """Always False: a step returns its tokens."""
        return False

    def drain(self) -> list[Sequence]:
        return []

    def preempt_all(self) -> None:
        """Discard all KV; running sequences return to the head of the queue."""
        self._waiting.extendleft(reversed(self._running))
        self._running = []
        self._runner.clear()

    def reset_prefix_cache(self) -> None:
        """No effect: there is no prefix cache. Only sequences that are prefilled together share a prompt."""

    def clear(self) -> None:
        self._waiting.clear()
        self._running = []
        self._runner.clear()

    def _drop(self, removed: set[Sequence]) -> None:
        running = [sequence for sequence in self._running if sequence in removed]
        if running:
            self._runner.remove(running)
            self._running = [sequence for sequence in self._running if sequence not in removed]


class HFRunner:
    """Prefill and decode: one row per sequence, right-aligned so that all rows append at the same column of the cache.

    The cache of a row holds all of its tokens except the last, which is the input of the next `decode`.
    """

    def __init__(self, model: Any, max_batched_tokens: int) -> None:
        self._model = model
        self._device = torch.device(model.device)
        self._max_batched_tokens = max_batched_tokens
        last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._head_options: dict[str, Any] = {"logits_to_keep": 1} if last_only else {}
        self.clear()

    def clear(self) -> None:
        """Discard all rows and their KV."""
        self._rows: list[Sequence | None] = []
        self._cache: Cache | None = None

    # Set by `_rebuild`.
    _cached: torch.Tensor
    """[rows]: number of tokens in the cache of each row."""
    _last_tokens: torch.Tensor
    """[rows]: the next input token of each row."""
    _mask: torch.Tensor
    """[rows, columns]: valid columns of the cache."""
    _batch: SamplingBatch
    """Sampling parameters of the rows."""

    @torch.inference_mode()
    def prefill(self, new_sequences: SequenceOf[Sequence]) -> SampledTokens:
        """Process the tokens of new sequences, add their rows, and sample the next token of each."""
        if self._device.type == "cuda":
            # The current device is a property of the thread, and every batch starts with a prefill.
            torch.cuda.set_device(self._device)
        rows = [row for row in self._rows if row is not None]
        cached, last_tokens = [len(row) - 1 for row in rows], [row.output.token_ids[-1] for row in rows]
        parts = [] if self._cache is None else [(self._cache, self._live_rows())]
        sampled: SampledTokens = []
        for chunk in self._chunks(new_sequences):
            cache, owner, logits = self._run_prompts([sequence.token_ids for sequence in chunk])
            batch = SamplingBatch.from_params([sequence.request.params for sequence in chunk], self._device)
            lengths = [len(sequence) for sequence in chunk]
            first_tokens = self._sample(logits.index_select(0, owner), chunk, batch, self._tensor(lengths))
            sampled += first_tokens
            parts.append((cache, owner))
            rows += chunk
            cached += lengths
            last_tokens += [token for _, token, *_ in first_tokens]
        self._rebuild(parts, rows, cached, last_tokens)
        return sampled

    @torch.inference_mode()
    def decode(self) -> SampledTokens:
        """Sample one token for every row."""
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

    def remove(self, sequences: SequenceOf[Sequence]) -> None:
        """Mark rows as finished; they are removed when `_COMPACT_SHARE` of all rows has finished."""
        finished = set(sequences)
        self._rows = [None if row in finished else row for row in self._rows]
        live = [row for row in self._rows if row is not None]
        if not live:
            self.clear()
        elif self._cache is not None and len(self._rows) - len(live) >= _COMPACT_SHARE * len(self._rows):
            parts = [(self._cache, self._live_rows())]
            self._rebuild(parts, live, [len(row) - 1 for row in live], [row.output.token_ids[-1] for row in live])

    def _sample(
        self, logits: torch.Tensor, rows: SequenceOf[Sequence | None], batch: SamplingBatch, positions: torch.Tensor
    ) -> SampledTokens:
        """Sample a token for each row of `logits` [rows, vocab]; finished rows are left out of the result."""
        live = [(index, row) for index, row in enumerate(rows) if row is not None]
        banned = banned_tokens((index, row.request.params, len(row.output.token_ids)) for index, row in live)
        sampled = sample_tokens(logits, batch, positions, banned)
        self._last_tokens = sampled.tokens
        columns = [column.tolist() for column in sampled]
        return [(row, *values) for row, *values in zip(rows, *columns, strict=True) if row is not None]

    def _run_prompts(self, prompts: list[list[int]]) -> tuple[Cache, torch.Tensor, torch.Tensor]:
        """Run the model on prompts, equal prompts only once. Returns the cache, the row of each prompt in it [prompts],
        and the logits after the last token [distinct prompts, vocab]."""
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
        """Build the batch from the selected rows of each cache, right-aligned, as wide as the longest row."""
        width = max(cached)
        selected = [index for _, index in parts]
        layers = zip(*(cache.layers for cache, _ in parts), strict=True)
        self._cache = Cache(layers=[_GrowingLayer.joined(layer, selected, width) for layer in layers])
        self._rows = list(rows)
        self._cached = self._tensor(cached)
        self._last_tokens = self._tensor(last_tokens)
        self._mask = _left_padded_mask(self._cached, width)
        self._batch = SamplingBatch.from_params([row.request.params for row in rows], self._device)

    def _chunks(self, new_sequences: SequenceOf[Sequence]) -> Iterator[list[Sequence]]:
        """Split into chunks of similar length, of at most `max_batched_tokens` padded tokens each."""
        chunk: list[Sequence] = []
        for sequence in sorted(new_sequences, key=len):
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
    """Keys and values with spare columns, so that a new token is appended without copying the old tokens."""

    keys: torch.Tensor
    values: torch.Tensor
    _key_buffer: torch.Tensor
    _value_buffer: torch.Tensor

    @classmethod
    def joined(cls, layers: SequenceOf[Any], rows: SequenceOf[torch.Tensor], width: int) -> _GrowingLayer:
        """A layer of the last `width` columns of the selected `rows` of each layer, left-padded."""
        self = cls()
        self.lazy_initialization(layers[0].keys, layers[0].values)
        self._key_buffer = _stacked([layer.keys for layer in layers], rows, width)
        self._value_buffer = _stacked([layer.values for layer in layers], rows, width)
        self.keys, self.values = self._key_buffer[..., :width, :], self._value_buffer[..., :width, :]
        return self

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        used = self.keys.shape[-2]
        needed = used + key_states.shape[-2]
        if needed > self._key_buffer.shape[-2]:
            more = needed - used + max(_GROWTH_COLUMNS, used // 4)
            self._key_buffer, self._value_buffer = pad(self.keys, (0, 0, 0, more)), pad(self.values, (0, 0, 0, more))
        self._key_buffer[..., used:needed, :] = key_states
        self._value_buffer[..., used:needed, :] = value_states
        self.keys, self.values = self._key_buffer[..., :needed, :], self._value_buffer[..., :needed, :]
        return self.keys, self.values


def _stacked(states: SequenceOf[torch.Tensor], rows: SequenceOf[torch.Tensor], width: int) -> torch.Tensor:
    """Select rows of each of `states` [batch, heads, columns, dim] → [rows, heads, width + spare columns, dim]."""
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
    """[rows] → [rows, width]: 1 in the last `lengths` columns."""
    return (torch.arange(width, device=lengths.device) >= width - lengths.unsqueeze(1)).to(torch.int64)
