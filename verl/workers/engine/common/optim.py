"""AdamW: schedule, loss scale for float16, moments in bfloat16, and the checks before a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

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


MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements whose moments are in float32 at a time (a larger tensor comes alone).
PORTION = 1 << 25


def portions(sizes: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Names in order, cut into runs of at most `PORTION` elements."""
    run: list[str] = []
    total = 0
    for name, size in sizes:
        if run and total + size > PORTION:
            yield run
            run, total = [], 0
        run.append(name)
        total += size
    if run:
        yield run


def working_bytes(elements: int, largest: int) -> int:
    """What a step takes beside moments of so many elements, of which the largest tensor has `largest`: both moments of
    a portion in float32, and as many random numbers to round them with."""
    return 16 * min(elements, max(largest, PORTION))


class WorkingMoments:
    """The moments of some parameters, in float32 for one step; `states` hold them in between."""

    def __init__(self, states: list[dict[str, Any]]) -> None:
        self._states = states
        self._kept = [state[key] for state in states for key in MOMENTS]
        ends = list(accumulate((value.numel() for value in self._kept), initial=0))
        self._all = torch.empty(ends[-1], dtype=torch.float32, device=self._kept[0].device)
        self._working = [
            self._all[start:end].view_as(value)
            for value, start, end in zip(self._kept, ends[:-1], ends[1:], strict=True)
        ]
        torch._foreach_copy_(self._working, self._kept)
        self._place(self._working)

    def put_back(self, noise: torch.Generator) -> None:
        """Round to bfloat16 in place of what was there before the step."""
        round_at_random(self._all, noise)
        torch._foreach_copy_(self._kept, self._working)
        self._place(self._kept)

    def _place(self, moments: list[torch.Tensor]) -> None:
        values = iter(moments)
        for state in self._states:
            for key in MOMENTS:
                state[key] = next(values)


def round_at_random(values: torch.Tensor, noise: torch.Generator) -> None:
    """float32 `values` to one of their two neighbours in bfloat16, in place: the nearer, the likelier.

    bfloat16 is float32 without its last 16 bits; a random number added to those carries with the right probability.
    """
    bits = values.view(torch.int32)
    bits.add_(torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=noise))
    bits.bitwise_and_(-(1 << 16))


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
