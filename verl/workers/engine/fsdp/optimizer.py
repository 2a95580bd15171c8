"""AdamW on each rank's own shards.

AdamW works element by element, so stepping the local shards gives what stepping the sharded tensors would, without the
cost of dispatching every operation through them (ten times AdamW's own on small models).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verl.config.engine import OptimConfig
from verl.workers.engine.common.optim import build_optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW over the sharded parameters `named`; its state comes out and goes in as sharded tensors."""

    def __init__(self, named: Mapping[str, nn.Parameter], optim: OptimConfig, mesh: DeviceMesh) -> None:
        self._named: dict[str, Any] = dict(named)
        # Stand-ins for AdamW; they hold memory only during a step, so that offloading the model really frees it.
        self._shards = {name: nn.Parameter(_local(value).new_empty(0)) for name, value in self._named.items()}
        self._group = mesh.get_group("shard")
        self.adamw = build_optimizer(self._shards.values(), optim)

    def gradients(self) -> list[torch.Tensor]:
        """This rank's shards of all gradients there are."""
        return [_local(parameter.grad) for parameter in self._named.values() if parameter.grad is not None]

    def grad_norm(self) -> torch.Tensor:
        """The norm over all ranks' shards: the same number on every rank; a collective."""
        norms = torch._foreach_norm(self.gradients())
        square = torch.stack(norms).double().square().sum()
        dist.all_reduce(square, group=self._group)
        return square.sqrt().float()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        torch._foreach_mul_(self.gradients(), factor)

    def step(self) -> None:
        """One AdamW step of every parameter that has a gradient."""
        for name, parameter in self._named.items():
            shard = self._shards[name]
            shard.data = _local(parameter)
            shard.grad = None if parameter.grad is None else _local(parameter.grad)
        self.adamw.step()
        for shard in self._shards.values():
            shard.grad = None
            shard.data = shard.data.new_empty(0)

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def to(self, device: torch.device) -> None:
        """Move the moments; in host memory they are page-locked, which is several times faster."""
        for state in self.adamw.state.values():
            for key, value in state.items():
                room = torch.empty_like(value, device=device, pin_memory=value.is_cuda and device.type == "cpu")
                state[key] = room.copy_(value, non_blocking=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as `parameter/key`, sharded like the parameter; empty before the first step. Shares memory."""
        found = {}
        for name, shard in self._shards.items():
            for key, value in self.adamw.state.get(shard, {}).items():
                found[f"{name}/{key}"] = _sharded_like(self._named[name], value) if key in _MOMENTS else value
        return found

    def prepare(self, stored: set[str]) -> dict[str, torch.Tensor]:
        """Make room for a stored state of these names, replacing the present one; returns that room."""
        self.adamw.state.clear()
        for name, shard in self._shards.items():
            if f"{name}/step" in stored:
                local = _local(self._named[name])
                state = {key: torch.zeros_like(local) for key in _MOMENTS}
                self.adamw.state[shard] = {"step": torch.zeros((), device=local.device), **state}
        return self.tensors()


def _local(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _sharded_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
