"""Choosing the next token: temperature, top-k, top-p, min-p or greedy, with noise by counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from verl.types.request import SamplingParams
from verl.utils.counter_noise import gumbel_noise
from verl.utils.device import copy_to_device

__all__ = ["SampledRows", "SamplingBatch", "Shape", "sample_tokens"]

Shape = Callable[[torch.Tensor, slice], torch.Tensor]
"""Changes logits [rows of the block, vocab] float32 before they are drawn from; the slice says which rows they are."""

# Elements of one float32 work block (128 MB): the extra memory of sampling, whatever batch × vocabulary is.
_BLOCK_ELEMENTS = 2**25


@dataclass(slots=True)
class SamplingBatch:
    """The parameters of a batch's rows as tensors, made once and used at every step."""

    keys: torch.Tensor
    """[rows] int64."""
    temperature: torch.Tensor
    """[rows, 1] float32, as are top_p and min_p; top_k is [rows, 1] int64."""
    greedy: torch.Tensor
    """[rows] bool."""
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    any_sampled: bool
    any_greedy: bool
    any_truncated: bool
    any_tempered: bool = True
    """Some temperature is not 1."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> SamplingBatch:
        """One row per entry of `params`; the device is not waited for."""
        columns = [
            torch.tensor([p.key for p in params], dtype=torch.int64),
            _column([p.temperature or 1.0 for p in params]),
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


class SampledRows(NamedTuple):
    """A token per row [rows] int64, and its log-probs [rows] float32."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    """Of the full distribution at the row's temperature, untouched by penalties, truncation and bans: what training
    computes."""
    raw_log_probs: torch.Tensor
    """The same at temperature 1."""
    drawn_log_probs: torch.Tensor
    """Of the distribution that was drawn from: after penalties, truncation and bans; 0 for a greedy row."""


def sample_tokens(
    logits: torch.Tensor,
    batch: SamplingBatch,
    positions: torch.Tensor,
    banned: Sequence[tuple[int, int]] = (),
    shape: Shape | None = None,
) -> SampledRows:
    """One token per row of `logits` [rows, vocab].

    `positions` [rows] is where the new token will stand in its sequence (padding not counted).
    """
    rows, vocab = logits.shape
    size = max(1, _BLOCK_ELEMENTS // vocab)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    found = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    for start in range(0, rows, size):
        block = slice(start, min(rows, start + size))
        raw = logits[block].float()
        temperature = batch.temperature[block]
        scores = raw / temperature if batch.any_tempered else raw
        log_norm = torch.logsumexp(scores, dim=-1)
        raw_norm = torch.logsumexp(raw, dim=-1) if batch.any_tempered else log_norm
        allowed = scores if shape is None else shape(raw, block) / temperature
        here = [(row - block.start, token) for row, token in banned if block.start <= row < block.stop]
        if here:
            (cells,) = copy_to_device([torch.tensor(here, dtype=torch.int64)], logits.device)
            allowed = allowed.index_put((cells[:, 0], cells[:, 1]), torch.full_like(scores[0, 0], -torch.inf))
        chosen, drawn_norm = _choose(allowed, batch, block, positions[block])
        tokens[block] = chosen
        score = scores.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        found[0, block] = score - log_norm
        found[1, block] = score * temperature.squeeze(-1) - raw_norm
        if drawn_norm is None and allowed is scores:
            drawn = score - log_norm
        else:
            norm = torch.logsumexp(allowed, dim=-1) if drawn_norm is None else drawn_norm
            drawn = allowed.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - norm
        # Not finite where no token is allowed: the row must fail, also a greedy one.
        found[2, block] = drawn.masked_fill(batch.greedy[block] & drawn.isfinite(), 0.0)
    return SampledRows(tokens, found[0], found[1], found[2])


def _choose(
    scores: torch.Tensor, batch: SamplingBatch, block: slice, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`scores` [rows, vocab] → a token per row: the likeliest of greedy rows, a sample of the others.

    The second result is the log of what truncation leaves of exp(scores), [rows]; None where nothing is truncated.
    """
    if not batch.any_sampled:
        return scores.argmax(dim=-1), None
    noisy = gumbel_noise(batch.keys[block], positions, scores.shape[-1]).add_(scores)
    norm = None
    if batch.any_truncated:
        dropped = _outside_of_nucleus(scores, batch.top_k[block], batch.top_p[block], batch.min_p[block])
        noisy.masked_fill_(dropped, -torch.inf)
        norm = torch.logsumexp(scores.masked_fill(dropped, -torch.inf), dim=-1)
    sampled = noisy.argmax(dim=-1)
    if batch.any_greedy:
        sampled = torch.where(batch.greedy[block], scores.argmax(dim=-1), sampled)
    return sampled, norm


def _outside_of_nucleus(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """What truncation drops, [rows, vocab] bool. Top-k first, then top-p of what it leaves; the likeliest always stays.

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
