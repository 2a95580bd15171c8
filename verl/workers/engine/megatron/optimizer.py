"""Megatron-Core's optimizers of one model as one AdamW, and this rank's parts of its state."""

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
from verl.workers.engine.common.optim import MOMENTS, build_schedule


class CoreAdamW:
    """AdamW over what learns in `chunks`. The distributed optimizer shards its state over ranks of equal weights.

    Building it and most methods are collectives.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optim: OptimConfig,
        total_steps: int | None,
        release_gradients: bool = False,
    ) -> None:
        """`release_gradients`: their buffers take memory only from the first pass of a step to its end."""
        self._chunks = list(chunks)
        self._release_gradients = release_gradients
        self._taken = False
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
            loss_scale=1.0 if model.fp16 else None,  # float16's scale is found as in other engines
            use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
            clip_grad=0.0,
        )
        # Without overrides every weight decays, as in other engines; by Core's own default vectors do not.
        self.core = get_megatron_optimizer(config, self._chunks, config_overrides={}, use_gloo_process_groups=False)
        for part in self._parts:
            _in_one_kernel(part.optimizer)
        self.schedules: list[LambdaLR] = [
            build_schedule(part.optimizer, optim, total_steps) for part in self._parts if part.optimizer is not None
        ]
        self.elements = int(self._summed(lambda part: [_count(_own(part))])[0])

    @property
    def _parts(self) -> list[Any]:
        """Of dense weights, and of experts."""
        return self.core.chained_optimizers

    @property
    def lr(self) -> float:
        return self.schedules[0].get_last_lr()[0]

    def take_gradients(self) -> None:
        """Before a pass: there is room for them."""
        self._taken = True
        for chunk in self._chunks if self._release_gradients else ():
            chunk.restore_grad_buffers(synchronize=False)

    def gather_gradients(self) -> None:
        """Those of all ranks and micro-batches, added up, where the optimizer finds them."""
        if not self._taken:
            raise RuntimeError("optimizer_step: there are no gradients; call forward_backward first.")
        finalize_model_grads(self._chunks)
        self.core.prepare_grads()

    def norms(self) -> tuple[float, float]:
        """Of the gradients, once gathered, and of the weights; the same on every rank."""
        gradients, weights = self._summed(
            lambda part: [_square(param.grad for param in _own(part)), _square(_own(part))]
        )
        return gradients**0.5, weights**0.5

    def weight_norm(self) -> float:
        return self._summed(lambda part: [_square(_own(part))])[0] ** 0.5

    def scale_gradients(self, factor: float) -> None:
        gradients = [param.grad for part in self._parts for param in part.get_parameters() if param.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def step(self) -> None:
        """One step of every weight, which all ranks that have it see; and of the schedule."""
        self.core.step_with_ready_grads()
        for schedule in self.schedules:
            schedule.step()

    def zero_grad(self) -> None:
        self._taken = False
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
            if self._release_gradients:
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        self.core.zero_grad()

    def state_tensors(self) -> list[torch.Tensor]:
        """Moments and, of a model in half precision, master weights, as this rank holds them."""
        weights = {param.untyped_storage().data_ptr() for chunk in self._chunks for param in chunk.parameters()}
        found = []
        for part in self._parts:
            masters = (param for param in part.get_parameters() if param.untyped_storage().data_ptr() not in weights)
            moments = (value for state in part.optimizer.state.values() for value in state.values())
            found += [value for value in (*masters, *moments) if isinstance(value, torch.Tensor)]
        return found

    def _summed(self, of: Callable[[Any], list[torch.Tensor]]) -> list[float]:
        """Numbers of every part, each added up over the ranks that share it."""
        total: torch.Tensor | None = None
        for part in self._parts:
            mine = torch.stack(of(part)).to(self._chunks[0].buffers[0].grad_data.device)
            dist.all_reduce(mine, group=part.get_grad_stats_parallel_group())
            total = mine if total is None else total + mine
        assert total is not None
        return total.tolist()


def _in_one_kernel(adam: Any) -> None:
    """torch's AdamW as other engines step with it; Core leaves it at kernels for each operation."""
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        for settings in (adam.defaults, *adam.param_groups):
            settings |= {"fused": True, "foreach": False}


def _own(part: Any) -> list[torch.Tensor]:
    """What counts on this rank: not a copy of a tied weight, nor one that all tensor ranks hold."""
    return [
        param
        for param in part.get_parameters()
        if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param)
    ]


def _count(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(float(sum(value.numel() for value in tensors)), dtype=torch.float64)


def _square(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """The sum of all squares; not finite where an element or its square is not."""
    found = [value.detach() for value in tensors if value is not None]
    if not found:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(found)).double().square().sum()


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
