"""AdamW on each rank's own shards.

AdamW works element by element, so stepping the local shards gives what stepping the sharded tensors would, without the
cost of dispatching every operation through them (ten times AdamW's own on small models).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from verl.config.engine import OptimConfig
from verl.workers.engine.common.offload import local_shard, sharded_like
from verl.workers.engine.common.optim import MOMENTS, WorkingMoments, build_optimizer, build_schedule, portions


class ShardedAdamW:
    """AdamW over the sharded parameters `named`; its state comes out and goes in as sharded tensors."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], optim: OptimConfig, mesh: DeviceMesh, total_steps: int | None = None
    ) -> None:
        self._named: dict[str, Any] = dict(named)
        # Stand-ins for AdamW; they hold memory only during a step, so that offloading the model really frees it.
        self._shards = {name: nn.Parameter(local_shard(value).new_empty(0)) for name, value in self._named.items()}
        self._group = mesh.get_group("shard")
        self._half = optim.state_dtype == "bf16"
        self._steps: int | None = 0  # None: as many as a loaded state says
        self.adamw = build_optimizer(self._shards.values(), optim)
        self.schedule = build_schedule(self.adamw, optim, total_steps)

    @property
    def lr(self) -> float:
        return self.schedule.get_last_lr()[0]

    def gradients(self) -> list[torch.Tensor]:
        """This rank's shards of all gradients there are."""
        return [local_shard(parameter.grad) for parameter in self._named.values() if parameter.grad is not None]

    def gather_gradients(self) -> None:
        """They are where the last pass has put them."""
        if not self.gradients():
            raise RuntimeError("optimizer_step: there are no gradients; call forward_backward first.")

    def norms(self) -> tuple[float, float]:
        """Of the gradients and of the weights, over all ranks' shards: the same on every rank; a collective.

        The host waits for both at once.
        """
        squares = torch.stack([_square(self.gradients()), _square(map(local_shard, self._named.values()))])
        dist.all_reduce(squares, group=self._group)
        gradients, weights = squares.sqrt().float().tolist()
        return gradients, weights

    def weight_norm(self) -> float:
        """That of the weights alone."""
        square = _square(map(local_shard, self._named.values()))
        dist.all_reduce(square, group=self._group)
        return float(square.sqrt())

    @property
    def elements(self) -> int:
        """Weights that learn, over all ranks."""
        return sum(value.numel() for value in self._named.values())

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        torch._foreach_mul_(self.gradients(), factor)

    def step(self) -> None:
        """One AdamW step of every parameter that has a gradient, and one of the schedule."""
        learning = [name for name, parameter in self._named.items() if parameter.grad is not None]
        if self._half:
            self._step_with_half_moments(learning)
        else:
            self._step(learning)
        self.schedule.step()

    def _step(self, names: Iterable[str]) -> None:
        for name in names:
            shard, parameter = self._shards[name], self._named[name]
            shard.data, shard.grad = local_shard(parameter), local_shard(parameter.grad)
        self.adamw.step()
        for name in names:
            shard = self._shards[name]
            shard.grad = None
            shard.data = shard.data.new_empty(0)

    def _step_with_half_moments(self, names: list[str]) -> None:
        """The same, a portion at a time. Noise is drawn by the number of the step, so replicas of a shard agree."""
        if self._steps is None:
            self._steps = int(torch.stack([state["step"] for state in self.adamw.state.values()]).max())
        for name in names:
            if not self.adamw.state[self._shards[name]]:
                self._give_state(name)
        noise = torch.Generator(local_shard(self._named[names[0]]).device).manual_seed(self._steps)
        for portion in portions((name, local_shard(self._named[name]).numel()) for name in names):
            moments = WorkingMoments([self.adamw.state[self._shards[name]] for name in portion])
            self._step(portion)
            moments.put_back(noise)
        self._steps += 1

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def state_tensors(self) -> list[torch.Tensor]:
        """Moments and step numbers, as this rank holds them."""
        return [value for state in self.adamw.state.values() for value in state.values()]

    def sizes(self) -> list[int]:
        """Bytes of the same, as they are after the first step."""
        found = []
        for local in map(local_shard, self._named.values()):
            found += [4] + [local.numel() * (2 if self._half else local.itemsize)] * len(MOMENTS)
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as `parameter/key`, sharded like the parameter; empty before the first step. Shares memory."""
        found = {}
        for name, shard in self._shards.items():
            for key, value in self.adamw.state.get(shard, {}).items():
                found[f"{name}/{key}"] = sharded_like(self._named[name], value) if key in MOMENTS else value
        return found

    def prepare(self, stored: set[str]) -> dict[str, torch.Tensor]:
        """Make room for a stored state of these names, replacing the present one; returns that room."""
        self.adamw.state.clear()
        for name in self._shards:
            if f"{name}/step" in stored:
                self._give_state(name)
        self._steps = None if self.adamw.state else 0
        return self.tensors()

    def _give_state(self, name: str) -> None:
        local = local_shard(self._named[name])
        moments = {key: torch.zeros_like(local, dtype=torch.bfloat16 if self._half else local.dtype) for key in MOMENTS}
        self.adamw.state[self._shards[name]] = {"step": torch.zeros((), device=local.device), **moments}


def _square(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of all squares, where the tensors are; not finite where an element or its square is not."""
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().sum()
