"""StepPlan: the work of one model step, as plain data that can be sent to other processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from verl.types.request import SamplingParams, TopLogProbs

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["Prefill", "SampledRows", "StepDetails", "StepExperts", "StepPlan", "TokenMasks", "banned_tokens"]

TokenMasks: TypeAlias = "tuple[list[int], np.ndarray]"
"""(rows in sample order, bitmask [rows, words] int32): bit i of a row, lowest first, is set if token i is allowed."""


@dataclass(slots=True)
class Prefill:
    """A chunk of a prompt (or of a preempted sequence) that is computed in this step."""

    slot: int
    start: int
    """Position of its first token."""
    token_ids: list[int]
    samples: list[int]
    """Slots that sample from its last position: the sequence's own first, then those forked from it in this step.
    Empty if the chunk does not reach the sequence's end."""
    targets: list[int] = field(default_factory=list)
    """The prompt tokens that follow its first positions. Their log-probs are returned, and the `top` most likely tokens
    at each of these positions."""
    top: int = 0
    context_experts: int = 0
    """Number of leading tokens of its sequence whose experts are returned; their KV may come from the prefix cache."""


@dataclass(slots=True)
class StepPlan:
    """One step of the model. Slots are rows of the device's tables: last token, block table, sampling parameters."""

    prefills: list[Prefill] = field(default_factory=list)
    decode_slots: list[int] = field(default_factory=list)
    """Slots that decode: the input of each is its last sampled token, which is on the device."""
    decode_positions: list[int] = field(default_factory=list)
    """Position of each of these input tokens in its sequence."""
    sample_slots: list[int] = field(default_factory=list)
    """Slots that sample, in order: every prefill's `samples`, then `decode_slots`. A row is an index into this list."""
    sample_positions: list[int] = field(default_factory=list)
    """Position of each sampled token in its sequence (padding not counted)."""
    new_params: list[tuple[int, SamplingParams]] = field(default_factory=list)
    """(slot, parameters) of sequences admitted in this step."""
    new_adapters: list[tuple[int, int]] = field(default_factory=list)
    """(slot, adapter slot or -1) of the sequences admitted in this step; empty if all use one adapter."""
    histories: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, prompt length, tokens) of the admitted sequences with penalties."""
    block_updates: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, column, block): changes of the block tables; all entries of a new slot."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): blocks to copy after this step's KV is written."""
    banned: list[tuple[int, int]] = field(default_factory=list)
    """(row in sample order, token): end tokens of sequences below min_new_tokens."""
    masks: TokenMasks | None = None
    """Allowed tokens of the rows with a grammar."""
    top_rows: list[tuple[int, int]] = field(default_factory=list)
    """(row in sample order, count): rows whose `count` most likely tokens are returned."""
    detailed: bool = False
    """Whether there are `top_rows`, or prefills with `targets`."""
    returns_experts: bool = False
    """The step returns the experts of every forward pass that samples."""


@dataclass(slots=True)
class StepDetails:
    """Top log-probs and prompt log-probs, for a plan that is `detailed`."""

    top: list[TopLogProbs]
    """For each of the plan's `top_rows`."""
    prompts: list[tuple[list[float], list[TopLogProbs]]]
    """For each prefill with `targets`: the log-probs of the targets, and the most likely tokens at their positions."""


@dataclass(slots=True)
class StepExperts:
    """Experts of a step's tokens, for a plan with `returns_experts`."""

    sampled: np.ndarray
    """[samples, layers, k]: experts of the token at whose position each row samples, in the order of `sample_slots`."""
    contexts: list[np.ndarray]
    """For each prefill with `context_experts`, the experts of these tokens [context_experts, layers, k]."""


class SampledRows(NamedTuple):
    """A token per row [rows] int64, and its log-probs [rows] float32."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    """Under the full distribution at the row's temperature, before penalties, truncation and bans, as training
    computes them."""
    raw_log_probs: torch.Tensor
    """Under the full distribution at temperature 1."""
    drawn_log_probs: torch.Tensor
    """Under the distribution sampled from: after penalties, truncation and bans; 0 for a greedy row."""


def banned_tokens(rows: Iterable[tuple[int, SamplingParams, int]]) -> list[tuple[int, int]]:
    """(row, token) pairs that must not be sampled: end tokens of sequences below min_new_tokens.

    `rows`: (row, parameters, number of generated tokens).
    """
    return [
        (row, token)
        for row, params, generated in rows
        if generated < params.min_new_tokens
        for token in sorted(params.end_token_ids)
    ]
