"""What this rank's optimizer holds of each weight: a run of its elements in float32, with their moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from verl.workers.engine.common.half_moments import MOMENTS


@dataclass(frozen=True, eq=False)
class OptimizerPart:
    """Elements of one of this rank's weights, from `start` on."""

    start: int
    master: torch.Tensor
    """Flat; of a weight in float32 the elements themselves."""
    adam: torch.optim.Optimizer
    group: dict[str, Any]
    sharded: bool
    """Over ranks that hold the same weight; otherwise each has all of it."""

    @property
    def _counts_steps(self) -> bool:
        """torch's own count per tensor; fused ones of others per group."""
        return isinstance(self.adam, torch.optim.Adam | torch.optim.AdamW)

    def moments(self) -> dict[str, torch.Tensor]:
        """Empty before the first step; shares memory."""
        state = self.adam.state.get(self.master, {})
        if not all(name in state for name in MOMENTS):
            return {}
        step = state["step"] if self._counts_steps else self.group.get("step", 0)
        found = {name: state[name].detach().view(-1) for name in MOMENTS}
        return {"step": torch.as_tensor(step, dtype=torch.float32), **found}

    def forget(self) -> None:
        """As before the first step."""
        self.adam.state.pop(self.master, None)

    def give_moments(self, step: float) -> dict[str, torch.Tensor]:
        """Make room for moments after so many steps, and give that."""
        state = {name: torch.zeros_like(self.master) for name in MOMENTS}
        if self._counts_steps:
            there = any(self.adam.defaults.get(key) for key in ("fused", "capturable"))
            device = self.master.device if there else torch.device("cpu")
            state["step"] = torch.tensor(step, dtype=torch.float32, device=device)
        else:
            self.group["step"] = int(step)
        self.adam.state[self.master] = state
        return {name: state[name].view(-1) for name in MOMENTS}


def optimizer_parts(core: Any, live: Mapping[str, torch.Tensor]) -> dict[str, OptimizerPart]:
    """By the names of `live`, of those weights of which this rank's optimizer holds some."""
    names = {id(value): name for name, value in live.items()}
    found: dict[str, OptimizerPart] = {}
    for each in getattr(core, "chained_optimizers", [core]):
        groups = {id(param): group for group in each.param_groups for param in group["params"]}
        for param, master in _masters(each):
            sharded = isinstance(each, DistributedOptimizer)
            start = each._get_model_param_range_map(param)["param"].start if sharded else 0
            found[names[id(param)]] = OptimizerPart(start, master, each.optimizer, groups[id(master)], sharded)
    return found


def _masters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each weight with what is stepped in its place."""
    pairs: Sequence[tuple[Any, Any]]
    if getattr(optimizer, "is_stub_optimizer", False):
        pairs = []
    elif isinstance(optimizer, DistributedOptimizer):
        pairs = [
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
    else:
        own = [group["params"] for group in optimizer.param_groups]
        pairs = [(own, own)]
    for weights, masters in pairs:
        for ours, theirs in zip(weights, masters, strict=True):
            yield from zip(ours, theirs, strict=True)


def publish(core: Any, chunks: Sequence[Any]) -> None:
    """After masters were changed: every rank's weights are theirs again. A collective."""
    for each in getattr(core, "chained_optimizers", [core]):
        if not getattr(each, "is_stub_optimizer", False) and hasattr(each, "_copy_main_params_to_model_params"):
            each._copy_main_params_to_model_params()
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)
