"""Why an optimizer step is not taken: decided from numbers that are the same on every rank, so all ranks agree."""

from __future__ import annotations

import math

EMPTY = "empty"
"""No token of the step counts in its loss: its gradient is 0, and AdamW's momentum would move the weights alone."""
SKIPPED = "skipped"
"""The gradient is not finite."""
SEARCHING = "loss_scale_search"
"""float16 gradients overflowed, and the loss scale that multiplies them can still come down."""
REASONS = (SKIPPED, EMPTY, SEARCHING)


def reason_against(tokens: float, grad_norm: float, scale_can_fall: bool) -> str | None:
    """Which of the `REASONS` holds for a step on `tokens` over all ranks; None: take it."""
    if tokens == 0:
        return EMPTY
    if not math.isfinite(grad_norm):
        return SEARCHING if scale_can_fall else SKIPPED
    return None


def step_metrics(grad_norm: float, lr: float, reason: str | None) -> dict[str, float]:
    """What `TrainEngine.optimizer_step` returns."""
    return {"grad_norm": grad_norm, "lr": lr} | {name: float(name == reason) for name in REASONS}
