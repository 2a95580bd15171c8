"""AdamW, its schedule, and the loss scale that half precision needs."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.config.engine import OptimConfig
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup


def build_optimizer(parameters: Iterable[torch.nn.Parameter], optim: OptimConfig) -> AdamW:
    """AdamW over all parameters, one kernel for all of a step."""
    beta1, beta2 = optim.betas
    return AdamW(
        parameters, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def build_schedule(optimizer: Optimizer, optim: OptimConfig, total_steps: int | None) -> LambdaLR:
    """Linear warm-up, then constant or cosine; `total_steps` of the run unless the config lays out its own."""
    steps = optim.total_training_steps or total_steps
    warmup = optim.lr_warmup_steps
    if warmup <= 0 and optim.lr_warmup_steps_ratio > 0:
        warmup = math.floor(optim.lr_warmup_steps_ratio * _known(steps, "lr_warmup_steps_ratio"))
    warmup = max(0, warmup)
    if optim.lr_scheduler == "cosine":
        return get_cosine_schedule_with_warmup(
            optimizer, warmup, _known(steps, "lr_scheduler=cosine"), optim.min_lr_ratio
        )
    return get_constant_schedule_with_warmup(optimizer, warmup)


def restore_schedule(schedule: LambdaLR, optimizer: Optimizer, step: int) -> None:
    """Continue after `step` optimizer steps."""
    schedule.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


class LossScale:
    """float16 gradients below 6e-8 are lost: the loss is multiplied by `value` and gradients divided by it again.

    It halves when a gradient overflows and doubles after `patience` good steps. Other dtypes need none: it stays 1.
    It may fall below 1: a loss that sums over all tokens has gradients that float16 cannot hold.
    """

    SMALLEST = 2.0**-16

    def __init__(self, dtype: torch.dtype, patience: int = 200) -> None:
        self.value = 2.0**16 if dtype == torch.float16 else 1.0
        self._adapts = dtype == torch.float16
        self._patience = patience
        self._good_steps = 0

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may be the scale's fault, and a smaller one is still to be tried."""
        return self._adapts and self.value > self.SMALLEST

    def update(self, finite: bool) -> None:
        if not self._adapts:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.SMALLEST, self.value / 2)
        elif self._good_steps == self._patience:
            self.value, self._good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self._adapts:
            self.value, self._good_steps = state["value"], int(state["good_steps"])


def _known(steps: int | None, key: str) -> int:
    if steps is None:
        raise ValueError(f"optim.{key}: needs the number of optimizer steps. Set optim.total_training_steps.")
    return steps
