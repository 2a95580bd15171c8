"""AdamW: learning rate schedule, loss scale for float16, moments in bfloat16, and the checks before a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.config.engine import OptimConfig
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup


def build_optimizer(parameters: Iterable[torch.nn.Parameter], optim: OptimConfig) -> AdamW:
    """Return a fused AdamW over all parameters."""
    beta1, beta2 = optim.betas
    return AdamW(
        parameters, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def build_schedule(optimizer: Optimizer, optim: OptimConfig, total_steps: int | None) -> LambdaLR:
    """Return the learning rate schedule: linear warm-up, then constant or cosine.

    `total_steps`: optimizer steps of the run, if known; `optim.total_training_steps` overrides it.
    """
    steps = optim.total_training_steps or total_steps
    warmup = optim.lr_warmup_steps
    if warmup <= 0 and optim.lr_warmup_steps_ratio > 0:
        warmup = math.floor(optim.lr_warmup_steps_ratio * _require_steps(steps, "lr_warmup_steps_ratio"))
    warmup = max(0, warmup)
    if optim.lr_scheduler == "cosine":
        return get_cosine_schedule_with_warmup(
            optimizer, warmup, _require_steps(steps, "lr_scheduler=cosine"), optim.min_lr_ratio
        )
    return get_constant_schedule_with_warmup(optimizer, warmup)


def restore_schedule(schedule: LambdaLR, optimizer: Optimizer, step: int) -> None:
    """Set the schedule and the learning rates of `optimizer` to the state after `step` optimizer steps."""
    schedule.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


class LossScale:
    """Dynamic loss scale for float16, whose gradients underflow below 6e-8; 1 for other dtypes.

    The loss is multiplied by `value` and gradients are divided by it. It halves when a gradient overflows and doubles
    after `patience` finite steps. It may fall below 1: a loss summed over all tokens can have gradients that overflow
    float16.
    """

    SMALLEST = 2.0**-16
    """Smallest value: an overflow at this scale is not caused by the scale."""

    def __init__(self, dtype: torch.dtype, patience: int = 200) -> None:
        self.value = 2.0**16 if dtype == torch.float16 else 1.0
        self._adapts = dtype == torch.float16
        self._patience = patience
        self._finite_steps = 0

    @property
    def can_decrease(self) -> bool:
        """Whether a smaller scale can be tried after an overflow."""
        return self._adapts and self.value > self.SMALLEST

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step. `finite`: whether all gradients were finite."""
        if not self._adapts:
            return
        self._finite_steps = self._finite_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.SMALLEST, self.value / 2)
        elif self._finite_steps == self._patience:
            self.value, self._finite_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self._finite_steps}  # names in existing checkpoints

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self._adapts:
            self.value, self._finite_steps = state["value"], int(state["good_steps"])


def _require_steps(steps: int | None, key: str) -> int:
    if steps is None:
        raise ValueError(f"optim.{key}: requires the number of optimizer steps. Set optim.total_training_steps.")
    return steps


def sum_of_squares(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Return the sum of squares of the elements of all tensors that are not None, in float64.

    It is not finite if an element or its square is not finite.
    """
    present = [value.detach() for value in tensors if value is not None]
    if not present:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(present)).double().square().sum()


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per parameter, beside `step`."""


class Float32Moments:
    """Expands bfloat16 moments to float32 for one AdamW step, and rounds them back stochastically.

    With beta2 = 0.999 a step changes the second moment by about 0.1 %, less than half of bfloat16's spacing (0.4 %):
    rounded to nearest, it would never change. Stochastic rounding is unbiased, with a noise of about 2 % in the step
    size.
    """

    def __init__(self, states: list[dict[str, Any]]) -> None:
        """Replace the moments in `states`, the optimizer state of some parameters, by float32 copies."""
        self._states = states
        self._stored = [state[key] for state in states for key in MOMENTS]
        ends = list(accumulate((value.numel() for value in self._stored), initial=0))
        self._flat = torch.empty(ends[-1], dtype=torch.float32, device=self._stored[0].device)
        self._expanded = [
            self._flat[start:end].view_as(value)
            for value, start, end in zip(self._stored, ends[:-1], ends[1:], strict=True)
        ]
        torch._foreach_copy_(self._expanded, self._stored)
        self._set_moments(self._expanded)

    def store(self, generator: torch.Generator) -> None:
        """Round the moments to bfloat16 and put them back into the optimizer state. `generator`: of the random bits."""
        round_stochastically(self._flat, generator)
        torch._foreach_copy_(self._stored, self._expanded)
        self._set_moments(self._stored)

    def _set_moments(self, moments: list[torch.Tensor]) -> None:
        values = iter(moments)
        for state in self._states:
            for key in MOMENTS:
                state[key] = next(values)


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> None:
    """Round float32 `values` in place to one of their two bfloat16 neighbours; the nearer one is the more likely.

    bfloat16 is float32 without its last 16 bits. A random number is added to these bits; the probability of a carry is
    the fraction that they stand for.
    """
    bits = values.view(torch.int32)
    bits.add_(torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator))
    bits.bitwise_and_(-(1 << 16))


# Reasons not to take an optimizer step, as names of metrics.
EMPTY = "empty"
"""No token of the step has a loss: the gradient is 0, and AdamW's momentum alone would move the weights."""
NON_FINITE = "skipped"
"""The gradient is not finite."""
SEARCHING = "loss_scale_search"
"""float16 gradients overflowed, and the loss scale can still decrease."""
REFUSED = "refused"
"""The learning rate is so large compared with the weights that the step would destroy them."""
REASONS = (NON_FINITE, EMPTY, SEARCHING, REFUSED)
"""Reasons not to take an optimizer step."""
RECOMPILES = "recompiles"
"""Key in the result of a step with compiled layers: number of graphs compiled since the last step."""

# AdamW moves every weight by about the learning rate. A step of more than a hundred times the root mean square of the
# weights destroys the model; weights that start at 0 (adapters) count as 0.01.
MAX_RELATIVE_STEP, _MIN_WEIGHT_RMS = 100.0, 0.01


def skip_reason(tokens: float, grad_norm: float, scale_can_decrease: bool, lr: float, weight_rms: float) -> str | None:
    """Return which of `REASONS` applies to a step, or None to take the step.

    `tokens`: number of tokens with a loss, over all ranks. `weight_rms`: root mean square of the trained weights. The
    arguments are the same on every rank, so all ranks agree.
    """
    if tokens == 0:
        return EMPTY
    if not math.isfinite(grad_norm):
        return SEARCHING if scale_can_decrease else NON_FINITE
    if lr > MAX_RELATIVE_STEP * max(weight_rms, _MIN_WEIGHT_RMS):
        return REFUSED
    return None


def step_metrics(grad_norm: float, lr: float, reason: str | None) -> dict[str, float]:
    """Return the result of `TrainEngine.optimizer_step`. `reason`: the result of `skip_reason`."""
    return {"grad_norm": grad_norm, "lr": lr} | {name: float(name == reason) for name in REASONS}
