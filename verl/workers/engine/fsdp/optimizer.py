"""AdamW on each rank's local shards.

AdamW works element by element, so stepping local shards gives the same result as stepping DTensors, without the cost of
dispatching every operation through DTensor (ten times the cost of AdamW itself on small models).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from verl.config.engine import OptimConfig
from verl.types.weights import bucketed
from verl.utils.buffer_sizes import PORTION
from verl.workers.engine.common.offload import local_shard, sharded_like
from verl.workers.engine.common.optim import MOMENTS, Float32Moments, build_optimizer, build_schedule, sum_of_squares


class ShardedAdamW:
    """AdamW over the sharded parameters `named`; its state is saved and loaded as DTensors."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], optim: OptimConfig, mesh: DeviceMesh, total_steps: int | None = None
    ) -> None:
        self._named: dict[str, Any] = dict(named)
        # Parameters of AdamW; they alias the shards only during a step, so that offloading the model frees its memory.
        self.shards = {name: nn.Parameter(local_shard(value).new_empty(0)) for name, value in self._named.items()}
        self._group = mesh.get_group("shard")
        self._bf16_moments = optim.state_dtype == "bf16"
        self._steps: int | None = 0  # None: not yet read from a loaded state
        self.adamw = build_optimizer(self.shards.values(), optim)
        self.schedule = build_schedule(self.adamw, optim, total_steps)

    @property
    def lr(self) -> float:
        return self.schedule.get_last_lr()[0]

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's shards of all existing gradients."""
        return [local_shard(parameter.grad) for parameter in self._named.values() if parameter.grad is not None]

    def gather_gradients(self) -> None:
        """No effect, since gradients are complete after the last backward pass; RuntimeError without gradients."""
        if not self.gradients():
            raise RuntimeError("optimizer_step: no gradients. Call forward_backward first.")

    def norms(self) -> tuple[float, float]:
        """Return the norms of gradients and weights over all ranks. A collective, with one host synchronisation."""
        squares = torch.stack(
            [sum_of_squares(self.gradients()), sum_of_squares(map(local_shard, self._named.values()))]
        )
        dist.all_reduce(squares, group=self._group)
        gradients, weights = squares.sqrt().float().tolist()
        return gradients, weights

    def weight_norm(self) -> float:
        """Return the norm of the weights over all ranks. A collective."""
        square = sum_of_squares(map(local_shard, self._named.values()))
        dist.all_reduce(square, group=self._group)
        return float(square.sqrt())

    @property
    def elements(self) -> int:
        """Number of trained weights over all ranks."""
        return sum(value.numel() for value in self._named.values())

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        torch._foreach_mul_(self.gradients(), factor)

    def step(self) -> None:
        """Step every parameter that has a gradient, and the schedule."""
        names = [name for name, parameter in self._named.items() if parameter.grad is not None]
        if self._bf16_moments:
            self._step_with_bf16_moments(names)
        else:
            self._step(names)
        self.schedule.step()

    def _step(self, names: Iterable[str]) -> None:
        for name in names:
            shard, parameter = self.shards[name], self._named[name]
            shard.data, shard.grad = local_shard(parameter), local_shard(parameter.grad)
        self.adamw.step()
        for name in names:
            shard = self.shards[name]
            shard.grad = None
            shard.data = shard.data.new_empty(0)

    def _step_with_bf16_moments(self, names: list[str]) -> None:
        """Step a portion of the parameters at a time. The step number seeds the stochastic rounding, so that replicas
        of a shard stay equal."""
        if self._steps is None:
            self._steps = int(torch.stack([state["step"] for state in self.adamw.state.values()]).max())
        for name in names:
            if not self.adamw.state[self.shards[name]]:
                self._init_state(name)
        generator = torch.Generator(local_shard(self._named[names[0]]).device).manual_seed(self._steps)
        sizes = ((name, local_shard(self._named[name]).numel()) for name in names)
        for portion in bucketed(sizes, PORTION):
            moments = Float32Moments([self.adamw.state[self.shards[name]] for name in portion])
            self._step(portion)
            moments.store(generator)
        self._steps += 1

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def state_tensors(self) -> list[torch.Tensor]:
        """Return this rank's moments and step numbers."""
        return [value for state in self.adamw.state.values() for value in state.values()]

    def sizes(self) -> list[int]:
        """Return the size in bytes that each state tensor has after the first step."""
        sizes = []
        for local in map(local_shard, self._named.values()):
            sizes += [4] + [local.numel() * (2 if self._bf16_moments else local.itemsize)] * len(MOMENTS)
        return sizes

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live state as `parameter/key`, sharded like the parameter; empty before the first step."""
        tensors = {}
        for name, shard in self.shards.items():
            for key, value in self.adamw.state.get(shard, {}).items():
                tensors[f"{name}/{key}"] = sharded_like(self._named[name], value) if key in MOMENTS else value
        return tensors

    def allocate_state(self, stored: set[str]) -> dict[str, torch.Tensor]:
        """Replace the state by zeros for the parameters with `stored` state; return the new tensors."""
        self.adamw.state.clear()
        for name in self.shards:
            if f"{name}/step" in stored:
                self._init_state(name)
        self._steps = None if self.adamw.state else 0
        return self.tensors()

    def _init_state(self, name: str) -> None:
        local = local_shard(self._named[name])
        moments = {
            key: torch.zeros_like(local, dtype=torch.bfloat16 if self._bf16_moments else local.dtype) for key in MOMENTS
        }
        self.adamw.state[self.shards[name]] = {"step": torch.zeros((), device=local.device), **moments}
