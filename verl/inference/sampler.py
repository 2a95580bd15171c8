"""Sampling of the next token: temperature, top-k, top-p, min-p, greedy, penalties, biases and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from verl.inference.step_plan import SampledRows, TokenMasks
from verl.types.request import SamplingParams
from verl.utils.counter_noise import gumbel_noise
from verl.utils.device import copy_to_device

__all__ = ["LogitsProcessor", "SampledRows", "Sampler", "SamplingBatch", "sample_tokens"]


class Sampler:
    """Samples tokens. The parameters of all slots are on the device; a step gathers those of the rows it samples."""

    def __init__(self, slots: int, max_model_len: int, device: torch.device) -> None:
        self._device = device
        self._penalties = _PenaltiesAndBiases(slots, max_model_len, device)
        self._slot_params = SamplingBatch.from_params([SamplingParams()] * slots, device)
        # Slots that need truncation, argmax, or division by the temperature. Sets on the host: deciding which of these
        # operations run needs no device synchronisation.
        self._truncated: set[int] = set()
        self._greedy: set[int] = set()
        self._tempered: set[int] = set()

    def assign(
        self, assigned: Sequence[tuple[int, SamplingParams]], histories: Sequence[tuple[int, int, list[int]]] = ()
    ) -> None:
        """Set the parameters of newly assigned slots; `histories` as in StepPlan."""
        if not assigned:
            return
        self._penalties.assign(assigned, histories)
        rows = SamplingBatch.from_params([params for _, params in assigned], self._device)
        (index,) = copy_to_device([torch.tensor([slot for slot, _ in assigned], dtype=torch.int64)], self._device)
        for name in ("keys", "temperature", "greedy", "top_k", "top_p", "min_p"):
            getattr(self._slot_params, name).index_copy_(0, index, getattr(rows, name))
        for slot, params in assigned:
            (self._truncated.add if params.truncated else self._truncated.discard)(slot)
            (self._greedy.add if params.greedy else self._greedy.discard)(slot)
            (self._tempered.discard if params.temperature in (0, 1) else self._tempered.add)(slot)

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        index: torch.Tensor,
        positions: torch.Tensor,
        banned: Sequence[tuple[int, int]],
        masks: TokenMasks | None = None,
    ) -> SampledRows:
        """Sample one token per row of `logits` [rows, vocab]; row i belongs to slot slots[i].

        `index` [rows] int64: `slots` on the device. `positions` [rows] int64: position of each new token in its
        sequence. `banned` and `masks` as in StepPlan.
        """
        any_truncated = not self._truncated.isdisjoint(slots)
        processor = self._penalties.processor(slots, index, positions)
        if masks is not None:
            processor = _with_masks(processor, masks, self._device)
        if self._device.type == "cuda" and not any_truncated and not banned and processor is None:
            return self._sample_fused(logits, index, positions)
        params = self._slot_params
        num_greedy = sum(slot in self._greedy for slot in slots) if self._greedy else 0
        batch = SamplingBatch(
            keys=params.keys[index],
            temperature=params.temperature[index],
            greedy=params.greedy[index],
            top_k=params.top_k[index],
            top_p=params.top_p[index],
            min_p=params.min_p[index],
            any_sampled=num_greedy < len(slots),
            any_greedy=num_greedy > 0,
            any_truncated=any_truncated,
            any_tempered=not self._tempered.isdisjoint(slots),
        )
        sampled = sample_tokens(logits, batch, positions, banned, processor)
        self._penalties.record(slots, index, positions, sampled.tokens)
        return sampled

    def _sample_fused(self, logits: torch.Tensor, index: torch.Tensor, positions: torch.Tensor) -> SampledRows:
        """Sample with one kernel, which supports temperatures and greedy rows only."""
        from verl.inference.kernels.sampling import sample_rows

        params = self._slot_params
        return sample_rows(logits, index, positions, params.keys, params.temperature, params.greedy)


def _with_masks(processor: LogitsProcessor | None, masks: TokenMasks, device: torch.device) -> LogitsProcessor:
    """A processor that applies `processor`, then sets forbidden tokens and tokens beyond the mask to -inf."""
    rows, words = masks
    mask_bytes = torch.from_numpy(words).view(torch.uint8)
    mask_bytes, bit_numbers = copy_to_device([mask_bytes, torch.arange(8, dtype=torch.uint8)], device)

    def apply(logits: torch.Tensor, block: slice) -> torch.Tensor:
        logits = logits.clone() if processor is None else processor(logits, block)
        # (index of the mask, row in the block)
        in_block = [(mask, row - block.start) for mask, row in enumerate(rows) if block.start <= row < block.stop]
        if in_block:
            (pairs,) = copy_to_device([torch.tensor(in_block, dtype=torch.int64)], device)
            mask_index, row_index = pairs.unbind(1)
            bits = (mask_bytes[mask_index].unsqueeze(-1) >> bit_numbers & 1).flatten(1)[:, : logits.shape[-1]].bool()
            allowed = torch.zeros(len(in_block), logits.shape[-1], dtype=torch.bool, device=device)
            allowed[:, : bits.shape[-1]] = bits
            logits[row_index] = logits[row_index].masked_fill(~allowed, -torch.inf)
        return logits

    return apply


class _PenaltiesAndBiases:
    """Repetition, frequency and presence penalties, and logit biases. Keeps the tokens of penalised slots on the
    device, in memory that is allocated for the first such slot."""

    def __init__(self, slots: int, max_model_len: int, device: torch.device) -> None:
        self._shape = (slots, max_model_len)
        self._device = device
        self._penalised: dict[int, int] = {}
        """Number of recorded tokens of each penalised slot. On the host, so that their maximum needs no device
        synchronisation."""
        self._biases: dict[int, list[torch.Tensor]] = {}
        """By slot: token ids, and the values added to their logits."""
        self._tokens = torch.empty(0)
        """Prompt and response of each penalised slot: [slots, max_model_len] int32 after `_allocate`."""

    def assign(
        self, assigned: Iterable[tuple[int, SamplingParams]], histories: Iterable[tuple[int, int, list[int]]]
    ) -> None:
        """Set the parameters of newly assigned slots. `histories`: (slot, prompt length, tokens) of penalised ones."""
        strengths = {}
        for slot, params in assigned:
            self._penalised.pop(slot, None)
            self._biases.pop(slot, None)
            if params.logit_bias:
                ids, values = zip(*params.logit_bias, strict=True)
                bias = [torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)]
                self._biases[slot] = copy_to_device(bias, self._device)
            if params.penalised:
                strengths[slot] = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        for slot, prompt_length, token_ids in histories:
            if not len(self._tokens):
                self._allocate()
            self._penalised[slot] = len(token_ids)
            self._tokens[slot, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32).to(self._device)
            self._prompt_lengths[slot] = prompt_length
            self._strengths[slot] = torch.tensor(strengths[slot]).to(self._device)

    def _allocate(self) -> None:
        slots, _ = self._shape
        self._tokens = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self._prompt_lengths = torch.zeros(slots, 1, dtype=torch.int64, device=self._device)
        # Repetition, frequency and presence penalty of each slot.
        self._strengths = torch.zeros(slots, 3, dtype=torch.float32, device=self._device)

    def processor(self, slots: Sequence[int], index: torch.Tensor, positions: torch.Tensor) -> LogitsProcessor | None:
        """The processor of these rows; None if none has penalties or biases.

        `index`, `positions` [rows]: `slots`, and the position of each new token, on the device.
        """
        if not self._penalised and not self._biases:
            return None
        if self._penalised.keys().isdisjoint(slots) and self._biases.keys().isdisjoint(slots):
            return None
        return partial(self._process, slots=slots, index=index, positions=positions)

    def record(self, slots: Sequence[int], index: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Record the sampled tokens [rows]."""
        if not self._penalised:
            return
        new_lengths = {slot: self._penalised[slot] + 1 for slot in slots if slot in self._penalised}
        if new_lengths:
            self._penalised.update(new_lengths)
            # Rows of slots without penalties are written too, but never read.
            self._tokens[index, positions] = tokens.int()

    def _process(
        self, logits: torch.Tensor, block: slice, slots: Sequence[int], index: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return a copy of `logits` [rows of the block, vocab] float32 with penalties and biases."""
        logits = logits.clone()
        block_slots = slots[block]
        penalised = [row for row, slot in enumerate(block_slots) if slot in self._penalised]
        if penalised:
            (rows,) = copy_to_device([torch.tensor(penalised, dtype=torch.int64)], self._device)
            longest = max(self._penalised[block_slots[row]] for row in penalised)
            tokens = self._tokens[:, :longest][index[block][rows]]
            logits[rows] = self._penalise(logits[rows], tokens, index[block][rows], positions[block][rows])
        for row, slot in enumerate(block_slots):
            if slot in self._biases:
                logits[row].index_add_(0, *self._biases[slot])
        return logits

    def _penalise(
        self, logits: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Return penalised `logits` [rows, vocab].

        `tokens` [rows, longest]: prompt and response of each row, of which the first `lengths` [rows] are valid.
        """
        tokens, position = tokens.long(), torch.arange(tokens.shape[1], device=self._device)
        valid = position < lengths.unsqueeze(1)
        generated = valid & (position >= self._prompt_lengths[slots])
        counts = torch.zeros_like(logits).scatter_add_(1, tokens, generated.float())
        present = torch.zeros_like(logits).scatter_add_(1, tokens, valid.float()) > 0
        repetition, frequency, presence = self._strengths[slots].unsqueeze(-1).unbind(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(present, repeated, logits) - frequency * counts - presence * (counts > 0)


LogitsProcessor = Callable[[torch.Tensor, slice], torch.Tensor]
"""Returns processed logits [rows of the block, vocab] float32; the slice selects the block's rows of the batch."""

# Elements of one float32 work block (128 MB): bounds the extra memory of sampling for any batch × vocabulary.
BLOCK_ELEMENTS = 2**25


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of the rows of a batch, as tensors on the device."""

    keys: torch.Tensor
    """Noise keys: [rows] int64."""
    temperature: torch.Tensor
    """[rows, 1] float32; 1 for greedy rows."""
    greedy: torch.Tensor
    """[rows] bool."""
    top_k: torch.Tensor
    """[rows, 1] int64."""
    top_p: torch.Tensor
    """[rows, 1] float32."""
    min_p: torch.Tensor
    """[rows, 1] float32."""
    any_sampled: bool
    """Some row is not greedy."""
    any_greedy: bool
    any_truncated: bool
    any_tempered: bool = True
    """Some temperature is not 1."""

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams], device: torch.device | str) -> SamplingBatch:
        """One row per entry of `params`, copied without synchronisation."""
        columns = [
            torch.tensor([p.key for p in params], dtype=torch.int64),
            _column([p.temperature or 1.0 for p in params]),  # 0 means greedy, without division
            torch.tensor([p.greedy for p in params], dtype=torch.bool),
            torch.tensor([p.top_k for p in params], dtype=torch.int64).unsqueeze(1),
            _column([p.top_p for p in params]),
            _column([p.min_p for p in params]),
        ]
        keys, temperature, greedy, top_k, top_p, min_p = copy_to_device(columns, torch.device(device))
        return cls(
            keys=keys,
            temperature=temperature,
            greedy=greedy,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            any_sampled=not all(p.greedy for p in params),
            any_greedy=any(p.greedy for p in params),
            any_truncated=any(p.truncated for p in params),
            any_tempered=any(p.temperature not in (0, 1) for p in params),
        )


def sample_tokens(
    logits: torch.Tensor,
    batch: SamplingBatch,
    positions: torch.Tensor,
    banned: Sequence[tuple[int, int]] = (),
    processor: LogitsProcessor | None = None,
) -> SampledRows:
    """Sample one token per row of `logits` [rows, vocab].

    `positions` [rows]: position of the new token in its sequence (padding not counted). `banned`: (row, token).
    `processor` changes the logits for sampling; of the returned log-probs, only `drawn_log_probs` include its changes.
    """
    rows, vocab = logits.shape
    size = max(1, BLOCK_ELEMENTS // vocab)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    for start in range(0, rows, size):
        block = slice(start, min(rows, start + size))
        raw = logits[block].float()
        temperature = batch.temperature[block]
        scores = raw / temperature if batch.any_tempered else raw
        log_norm = torch.logsumexp(scores, dim=-1)
        raw_norm = torch.logsumexp(raw, dim=-1) if batch.any_tempered else log_norm
        allowed = scores if processor is None else processor(raw, block) / temperature
        in_block = [(row - block.start, token) for row, token in banned if block.start <= row < block.stop]
        if in_block:
            (cells,) = copy_to_device([torch.tensor(in_block, dtype=torch.int64)], logits.device)
            allowed = allowed.index_put((cells[:, 0], cells[:, 1]), torch.full_like(scores[0, 0], -torch.inf))
        chosen, drawn_norm = _choose(allowed, batch, block, positions[block])
        tokens[block] = chosen
        score = scores.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        # Under the distribution with temperature, without temperature, and as sampled (penalties, bans, truncation).
        log_probs[0, block] = score - log_norm
        log_probs[1, block] = score * temperature.squeeze(-1) - raw_norm
        if drawn_norm is None and allowed is scores:
            drawn = score - log_norm
        else:
            norm = torch.logsumexp(allowed, dim=-1) if drawn_norm is None else drawn_norm
            drawn = allowed.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - norm
        # A greedy token has probability 1. If no token is allowed, the value stays non-finite, so that the row fails.
        log_probs[2, block] = drawn.masked_fill(batch.greedy[block] & drawn.isfinite(), 0.0)
    return SampledRows(tokens, log_probs[0], log_probs[1], log_probs[2])


def _choose(
    scores: torch.Tensor, batch: SamplingBatch, block: slice, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`scores` [rows, vocab] → a token per row: argmax for greedy rows, a sample for the others.

    The second result is the log-sum-exp of the scores left by truncation, [rows]; None without truncation.
    """
    if not batch.any_sampled:
        return scores.argmax(dim=-1), None
    noisy = gumbel_noise(batch.keys[block], positions, scores.shape[-1]).add_(scores)
    norm = None
    if batch.any_truncated:
        dropped = _truncated_tokens(scores, batch.top_k[block], batch.top_p[block], batch.min_p[block])
        noisy.masked_fill_(dropped, -torch.inf)
        norm = torch.logsumexp(scores.masked_fill(dropped, -torch.inf), dim=-1)
    sampled = noisy.argmax(dim=-1)
    if batch.any_greedy:
        sampled = torch.where(batch.greedy[block], scores.argmax(dim=-1), sampled)
    return sampled, norm


def _truncated_tokens(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Tokens dropped by truncation, [rows, vocab] bool: top-k first, then top-p and min-p; the most likely one stays.

    A token is in the nucleus while the tokens before it, by probability, have less than `top_p` together. Equal
    probabilities are ordered by token id.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    drop = (top_k > 0) & (rank >= top_k)
    probs = ordered.masked_fill(drop, -torch.inf).softmax(dim=-1)
    drop |= (top_p < 1) & (probs.cumsum(dim=-1) - probs >= top_p)
    drop |= probs < min_p * probs[:, :1]
    drop[:, 0] = False
    return torch.empty_like(drop).scatter_(-1, order, drop)


def _column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)
