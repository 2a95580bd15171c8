"""StepPlan: what one step of the model computes, as plain data that can be sent to other processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from verl.types.request import SamplingParams, TopLogProbs

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Prefill", "StepDetails", "StepExperts", "StepPlan", "TokenMasks", "banned_tokens"]

TokenMasks: TypeAlias = "tuple[list[int], np.ndarray]"
"""Rows in sample order, and [those rows, words] int32: a bit for each token, the lowest first, whether it may come."""


@dataclass(slots=True)
class Prefill:
    """A piece of a prompt (or of a sequence whose KV was dropped) that is computed in this step."""

    slot: int
    start: int
    """Position of its first token."""
    token_ids: list[int]
    samples: list[int]
    """Slots that sample from its last position: the sequence's own first, then those forked from it in this step.
    Empty if the piece does not reach the sequence's end."""
    targets: list[int] = field(default_factory=list)
    """The tokens after its first ones, to be told their log-probs and `top` likelier ones."""
    top: int = 0
    context_experts: int = 0
    """Number of leading tokens of its sequence whose experts are returned; their KV may come from the prefix cache."""


@dataclass(slots=True)
class StepPlan:
    """One step of the model. Slots are rows of the device's tables: last token, block table, sampling parameters."""

    prefills: list[Prefill] = field(default_factory=list)
    decode_slots: list[int] = field(default_factory=list)
    """Slots that are fed their last token, which the device knows."""
    decode_positions: list[int] = field(default_factory=list)
    """Where each of those tokens stands in its sequence."""
    sample_slots: list[int] = field(default_factory=list)
    """Rows that sample, in order: every prefill's `samples`, then the decodes."""
    sample_positions: list[int] = field(default_factory=list)
    """Where each sampled token will stand in its sequence (padding not counted)."""
    new_params: list[tuple[int, SamplingParams]] = field(default_factory=list)
    """Slots that a sequence takes in this step."""
    histories: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, length of the prompt, tokens) of those among them whose tokens change their logits."""
    block_updates: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, column, block): changes of the block tables, everything of a new slot included."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): blocks to be copied after this step's KV is written."""
    banned: list[tuple[int, int]] = field(default_factory=list)
    """(row in sample order, token): ends of answers that are still too short."""
    masks: TokenMasks | None = None
    """Rows of which only some tokens are allowed."""
    top_rows: list[tuple[int, int]] = field(default_factory=list)
    """(row in sample order, how many): who is told the likeliest tokens."""
    detailed: bool = False
    """There are `top_rows`, or prefills with `targets`."""
    returns_experts: bool = False
    """The step returns the experts of every forward pass that samples."""


@dataclass(slots=True)
class StepDetails:
    """What only some sequences ask for: a step's likeliest tokens."""

    top: list[TopLogProbs]
    """For each of the plan's `top_rows`."""
    prompts: list[tuple[list[float], list[TopLogProbs]]]
    """For each prefill with `targets`: their log-probs, and the likeliest tokens in their places."""


@dataclass(slots=True)
class StepExperts:
    """Experts of a step's tokens, for a plan with `returns_experts`."""

    sampled: np.ndarray
    """[samples, layers, k]: of the tokens whose hidden states were sampled from, in the order of `sample_slots`."""
    contexts: list[np.ndarray]
    """[context_experts, layers, k] for each prefill with `context_experts`."""


def banned_tokens(rows: Iterable[tuple[int, SamplingParams, int]]) -> list[tuple[int, int]]:
    """(row, token) pairs that may not be drawn now: the ends of answers that are too short.

    `rows` are (row, its parameters, how many tokens it has generated).
    """
    return [
        (row, token)
        for row, params, generated in rows
        if generated < params.min_new_tokens
        for token in sorted(params.ends)
    ]
