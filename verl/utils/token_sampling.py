"""Choosing the next token: temperature, top-k, top-p, min-p or greedy, with noise by counter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from verl.utils.counter_noise import gumbel_noise

__all__ = ["SamplingBatch", "SamplingParams", "sample_tokens"]

# Elements of one float32 work block (128 MB): the extra memory of sampling, whatever batch × vocabulary is.
_BLOCK_ELEMENTS = 2**25


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one answer is sampled, and when it ends."""

    key: int = 0
    """Noise key of this sample (`counter_noise.sample_keys`)."""
    temperature: float = 1.0
    """0 is greedy; log-probs are then reported at temperature 1."""
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    do_sample: bool = True
    max_new_tokens: int = 16
    min_new_tokens: int = 0
    """Tokens that end an answer are not drawn before it has this many."""
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 (all tokens), or how many to consider")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            "0 to max_new_tokens",
        )

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end this answer."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids


class SamplingBatch:
    """The parameters of a batch's rows as tensors, made once and used at every step."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self.params = list(params)
        self.keys = torch.tensor([p.key for p in params], dtype=torch.int64, device=device)
        self.temperature = _column([p.temperature or 1.0 for p in params], device)
        self.greedy = torch.tensor([p.greedy for p in params], dtype=torch.bool, device=device)
        self.top_k = torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device).unsqueeze(1)
        self.top_p = _column([p.top_p for p in params], device)
        self.min_p = _column([p.min_p for p in params], device)
        self.any_sampled = not all(p.greedy for p in params)
        self.any_greedy = any(p.greedy for p in params)
        self.any_truncated = any(not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params)
        self.any_minimum = any(p.min_new_tokens > 0 for p in params)

    def banned(self, generated: Sequence[int]) -> list[tuple[int, int]]:
        """(row, token) pairs that may not be drawn now: ends of answers that are too short with `generated` tokens."""
        if not self.any_minimum:
            return []
        short = [row for row, p in enumerate(self.params) if generated[row] < p.min_new_tokens]
        return [(row, token) for row in short for token in sorted(self.params[row].ends)]


def sample_tokens(
    logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor, banned: Sequence[tuple[int, int]] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-probability: `logits` [rows, vocab] → tokens [rows], log_probs [rows] float32.

    `positions` [rows] is where the new token will stand in its sequence (padding not counted). Log-probs are those of
    the full distribution at the row's temperature, untouched by truncation and bans: what training computes.
    """
    rows, vocab = logits.shape
    size = max(1, _BLOCK_ELEMENTS // vocab)
    forbidden = torch.tensor(list(banned), dtype=torch.int64, device=logits.device).view(-1, 2)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    for start in range(0, rows, size):
        block = slice(start, min(rows, start + size))
        scores = logits[block].float() / batch.temperature[block]
        log_norm = torch.logsumexp(scores, dim=-1)
        allowed = scores
        if len(forbidden):
            here = forbidden[(forbidden[:, 0] >= block.start) & (forbidden[:, 0] < block.stop)]
            allowed = scores.index_put((here[:, 0] - block.start, here[:, 1]), scores.new_tensor(-torch.inf))
        chosen = _choose(allowed, batch, block, positions[block])
        tokens[block] = chosen
        log_probs[block] = scores.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - log_norm
    return tokens, log_probs


def _choose(scores: torch.Tensor, batch: SamplingBatch, block: slice, positions: torch.Tensor) -> torch.Tensor:
    """`scores` [rows, vocab] → a token per row: the likeliest of greedy rows, a sample of the others."""
    if not batch.any_sampled:
        return scores.argmax(dim=-1)
    noisy = gumbel_noise(batch.keys[block], positions, scores.shape[-1]).add_(scores)
    if batch.any_truncated:
        dropped = _outside_of_nucleus(scores, batch.top_k[block], batch.top_p[block], batch.min_p[block])
        noisy.masked_fill_(dropped, -torch.inf)
    sampled = noisy.argmax(dim=-1)
    return torch.where(batch.greedy[block], scores.argmax(dim=-1), sampled) if batch.any_greedy else sampled


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


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def _require(holds: bool, name: str, value: float, allowed: str) -> None:
    if not holds:
        raise ValueError(f"sampling {name}: {value} is impossible. Use {allowed}.")
