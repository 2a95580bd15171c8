"""Why an optimizer step is not taken: decided from numbers that are the same on every rank, so all ranks agree."""

from __future__ import annotations

import math

EMPTY = "empty"
"""No token of the step counts in its loss: its gradient is 0, and AdamW's momentum would move the weights alone."""
SKIPPED = "skipped"
"""The gradient is not finite."""
SEARCHING = "loss_scale_search"
"""float16 gradients overflowed, and the loss scale that multiplies them can still come down."""
REFUSED = "refused"
"""The step is so large beside the weights that nothing would be left of them."""
REASONS = (SKIPPED, EMPTY, SEARCHING, REFUSED)

# AdamW moves every weight by about the learning rate. A hundred times the typical weight is no step from it any more;
# weights that start at 0 (an adapter) count as this large.
_LARGEST_STEP, _LEAST_WEIGHT = 100.0, 0.01


def reason_against(tokens: float, grad_norm: float, scale_can_fall: bool, lr: float, weight_rms: float) -> str | None:
    """Which of the `REASONS` holds for a step on `tokens` over all ranks; None: take it."""
    if tokens == 0:
        return EMPTY
    if not math.isfinite(grad_norm):
        return SEARCHING if scale_can_fall else SKIPPED
    if lr > _LARGEST_STEP * max(weight_rms, _LEAST_WEIGHT):
        return REFUSED
    return None


def step_metrics(grad_norm: float, lr: float, reason: str | None) -> dict[str, float]:
    """What `TrainEngine.optimizer_step` returns."""
    return {"grad_norm": grad_norm, "lr": lr} | {name: float(name == reason) for name in REASONS}
