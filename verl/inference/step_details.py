"""The likeliest tokens of a step, and log-probs of prompts: computed on the device for the few rows that ask."""

from __future__ import annotations

from collections.abc import Callable

import torch

from verl.inference.models import InferenceModel
from verl.inference.step_plan import StepDetails, StepPlan
from verl.types.request import TopLogProbs

__all__ = ["details_of"]

# Logits of a long prompt that are there at a time.
_BLOCK_ELEMENTS = 2**25


def details_of(
    plan: StepPlan, model: InferenceModel, hidden: torch.Tensor, logits: torch.Tensor
) -> Callable[[], StepDetails]:
    """What the plan's `top_rows` and prefills with `targets` ask for; the device is not waited for until it is called.

    `hidden` [tokens, hidden] of the step; `logits` [samples, vocab].
    """
    rows = [row for row, _ in plan.top_rows]
    top = [_scored(logits[rows], [0] * len(rows), max(count for _, count in plan.top_rows))] if rows else []
    prompts = []
    first, size = 0, max(1, _BLOCK_ELEMENTS // logits.shape[-1])
    for prefill in plan.prefills:
        if prefill.targets:
            parts = [prefill.targets[start : start + size] for start in range(0, len(prefill.targets), size)]
            starts = range(first, first + len(prefill.targets), size)
            states = [hidden[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]
            prompts.append([_scored(model.logits(x), part, prefill.top) for x, part in zip(states, parts, strict=True)])
        first += len(prefill.token_ids)
    return lambda: StepDetails(_on_host(top)[1], [_on_host(prompt) for prompt in prompts])


def _scored(logits: torch.Tensor, targets: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`logits` [rows, vocab] → log-probs of the targets [rows]; of the likeliest tokens [rows, count], and those."""
    log_probs = logits.float().log_softmax(dim=-1)
    of_target = log_probs.gather(-1, torch.tensor(targets, device=logits.device).unsqueeze(-1)).squeeze(-1)
    values, tokens = log_probs.topk(min(count, logits.shape[-1]), dim=-1)
    return of_target, values, tokens


def _on_host(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[list[float], list[TopLogProbs]]:
    """Log-probs of the targets, and the likeliest tokens in their places, of all parts."""
    log_probs: list[float] = []
    tops: list[TopLogProbs] = []
    for of_target, values, tokens in parts:
        log_probs += of_target.tolist()
        tops += [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]
    return log_probs, tops
