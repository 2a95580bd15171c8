"""Megatron-Core's optimizers of one model as one AdamW, and access to this rank's part of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch.optim.lr_scheduler import LambdaLR

from verl.config.engine import OptimConfig
from verl.workers.engine.common.optim import MOMENTS, build_schedule, sum_of_squares


class CoreAdamW:
    """AdamW over the model chunks. The distributed optimizer shards its state over ranks that have the same weights.

    Implements `EngineOptimizer`. The constructor and most methods are collectives.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optim: OptimConfig,
        total_steps: int | None,
        release_gradients: bool = False,
    ) -> None:
        """`release_gradients`: gradient buffers are allocated only from the first pass of a step to its end."""
        self._chunks = list(chunks)
        self._release_gradients = release_gradients
        self._has_gradients = False
        model = chunks[0].config
        beta1, beta2 = optim.betas
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=0.0,
            weight_decay=optim.weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_eps=optim.eps,
            bf16=model.bf16,
            fp16=model.fp16,
            params_dtype=model.params_dtype,
            loss_scale=1.0 if model.fp16 else None,  # the engine's own LossScale is used
            use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
            clip_grad=0.0,
        )
        # With empty overrides all weights decay, as in other engines; by Core's default vectors do not.
        self.core = get_megatron_optimizer(config, self._chunks, config_overrides={}, use_gloo_process_groups=False)
        for part in self._parts:
            _use_fused(part.optimizer)
        self.schedules: list[LambdaLR] = [
            build_schedule(part.optimizer, optim, total_steps) for part in self._parts if part.optimizer is not None
        ]
        self.elements = int(self._summed(lambda part: [_count(_unique_parameters(part))])[0])

    @property
    def _parts(self) -> list[Any]:
        """Core's optimizers of dense weights and of experts."""
        return self.core.chained_optimizers

    @property
    def lr(self) -> float:
        return self.schedules[0].get_last_lr()[0]

    def begin_gradients(self) -> None:
        """Allocate gradient buffers before a pass."""
        self._has_gradients = True
        for chunk in self._chunks if self._release_gradients else ():
            chunk.restore_grad_buffers(synchronize=False)

    def gather_gradients(self) -> None:
        """Sum the gradients of all ranks and micro-batches. RuntimeError without a pass."""
        if not self._has_gradients:
            raise RuntimeError("optimizer_step: no gradients. Call forward_backward first.")
        finalize_model_grads(self._chunks)
        self.core.prepare_grads()

    def norms(self) -> tuple[float, float]:
        """Return the norms of gathered gradients and of weights, equal on every rank."""
        gradients, weights = self._summed(
            lambda part: [
                sum_of_squares(param.grad for param in _unique_parameters(part)),
                sum_of_squares(_unique_parameters(part)),
            ]
        )
        return gradients**0.5, weights**0.5

    def weight_norm(self) -> float:
        return self._summed(lambda part: [sum_of_squares(_unique_parameters(part))])[0] ** 0.5

    def scale_gradients(self, factor: float) -> None:
        gradients = [param.grad for part in self._parts for param in part.get_parameters() if param.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def step(self) -> None:
        """Step all weights and the schedule."""
        self.core.step_with_ready_grads()
        for schedule in self.schedules:
            schedule.step()

    def zero_grad(self) -> None:
        self._has_gradients = False
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
            if self._release_gradients:
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        self.core.zero_grad()

    def state_tensors(self) -> list[torch.Tensor]:
        """Return this rank's moments and, for a model in half precision, master weights."""
        weights = {param.untyped_storage().data_ptr() for chunk in self._chunks for param in chunk.parameters()}
        tensors = []
        for part in self._parts:
            masters = (param for param in part.get_parameters() if param.untyped_storage().data_ptr() not in weights)
            moments = (value for state in part.optimizer.state.values() for value in state.values())
            tensors += [value for value in (*masters, *moments) if isinstance(value, torch.Tensor)]
        return tensors

    def _summed(self, values_of: Callable[[Any], list[torch.Tensor]]) -> list[float]:
        """Return each value summed over Core's optimizers, and over the ranks that split an optimizer's weights."""
        total: torch.Tensor | None = None
        for part in self._parts:
            own = torch.stack(values_of(part)).to(self._chunks[0].buffers[0].grad_data.device)
            dist.all_reduce(own, group=part.get_grad_stats_parallel_group())
            total = own if total is None else total + own
        assert total is not None
        return total.tolist()


def _use_fused(adam: Any) -> None:
    """Switch torch's AdamW to its fused kernel, as in other engines; Core uses one kernel per operation."""
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        for settings in (adam.defaults, *adam.param_groups):
            settings |= {"fused": True, "foreach": False}


def _unique_parameters(part: Any) -> list[torch.Tensor]:
    """Return this rank's parameters without duplicates (tied weights, weights replicated on all tensor-parallel ranks),
    so that sums over all ranks count every weight once."""
    return [
        param
        for param in part.get_parameters()
        if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param)
    ]


def _count(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(float(sum(value.numel() for value in tensors)), dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class OptimizerPart:
    """Consecutive elements of one of this rank's weights, from `start` on, whose optimizer state this rank holds."""

    start: int
    master: torch.Tensor
    """Master weight, flat; for a float32 weight the elements themselves."""
    adam: torch.optim.Optimizer
    group: dict[str, Any]
    sharded: bool
    """Whether the state is sharded over the ranks that have the same weight; otherwise each of them holds all of it."""

    @property
    def _steps_per_tensor(self) -> bool:
        """Whether steps are counted per tensor (torch), or per group (other fused optimizers)."""
        return isinstance(self.adam, torch.optim.Adam | torch.optim.AdamW)

    def moments(self) -> dict[str, torch.Tensor]:
        """Return the live moments and the step number; empty before the first step."""
        state = self.adam.state.get(self.master, {})
        if not all(name in state for name in MOMENTS):
            return {}
        step = state["step"] if self._steps_per_tensor else self.group.get("step", 0)
        moments = {name: state[name].detach().view(-1) for name in MOMENTS}
        return {"step": torch.as_tensor(step, dtype=torch.float32), **moments}

    def clear_state(self) -> None:
        """Reset to the state before the first step."""
        self.adam.state.pop(self.master, None)

    def allocate_moments(self, step: float) -> dict[str, torch.Tensor]:
        """Set the state to zero moments after `step` steps, and return the live moments."""
        state = {name: torch.zeros_like(self.master) for name in MOMENTS}
        if self._steps_per_tensor:
            on_device = any(self.adam.defaults.get(key) for key in ("fused", "capturable"))
            device = self.master.device if on_device else torch.device("cpu")
            state["step"] = torch.tensor(step, dtype=torch.float32, device=device)
        else:
            self.group["step"] = int(step)
        self.adam.state[self.master] = state
        return {name: state[name].view(-1) for name in MOMENTS}


def optimizer_parts(core: Any, live: Mapping[str, torch.Tensor]) -> dict[str, OptimizerPart]:
    """Return the parts that this rank's optimizer holds, by the names of `live`."""
    names = {id(value): name for name, value in live.items()}
    parts: dict[str, OptimizerPart] = {}
    for optimizer in getattr(core, "chained_optimizers", [core]):
        groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        for param, master in _masters(optimizer):
            sharded = isinstance(optimizer, DistributedOptimizer)
            start = optimizer._get_model_param_range_map(param)["param"].start if sharded else 0
            parts[names[id(param)]] = OptimizerPart(start, master, optimizer.optimizer, groups[id(master)], sharded)
    return parts


def _masters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each weight with its master weight, the tensor that the optimizer steps."""
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
        params = [group["params"] for group in optimizer.param_groups]
        pairs = [(params, params)]
    for weight_groups, master_groups in pairs:
        for weights, masters in zip(weight_groups, master_groups, strict=True):
            yield from zip(weights, masters, strict=True)


def copy_masters_to_weights(core: Any, chunks: Sequence[Any]) -> None:
    """Update the weights of all ranks from changed master weights. A collective."""
    for optimizer in getattr(core, "chained_optimizers", [core]):
        is_stub = getattr(optimizer, "is_stub_optimizer", False)
        if not is_stub and hasattr(optimizer, "_copy_main_params_to_model_params"):
            optimizer._copy_main_params_to_model_params()
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)
