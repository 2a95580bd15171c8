"""Which part of a model each rank has: Megatron-Core's process groups, one set for every layout in the process.

Core keeps its groups, its random states and its buffers in module globals, one set per process. An actor and a critic
of different layouts share processes here, so each layout keeps a set of its own and puts it in while it is at work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.tensor_parallel import random as core_random

from verl.config.engine import MegatronConfig

_MODULES: tuple[ModuleType, ...] = (parallel_state, core_random, num_microbatches_calculator)
# Megatron's own seeds only ever reach dropout, which is off.
_SEED = 1


@dataclass(frozen=True)
class Sizes:
    """How many ranks share what; the rest are data-parallel."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @classmethod
    def of(cls, config: MegatronConfig) -> Sizes:
        return cls(
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.virtual_pipeline_model_parallel_size,
            config.context_parallel_size,
            config.expert_model_parallel_size,
            config.expert_tensor_parallel_size,
        )


@dataclass(frozen=True)
class Part:
    """This rank's place in one of its groups."""

    rank: int
    size: int
    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks in the order of the group."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Part:
        return cls(dist.get_rank(group), dist.get_world_size(group), group, tuple(dist.get_process_group_ranks(group)))


class CoreLayout:
    """Core's groups for one set of sizes, and the state that belongs to them. Making one is a collective."""

    _known: ClassVar[dict[Sizes, CoreLayout]] = {}
    _active: ClassVar[CoreLayout | None] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._world = dist.group.WORLD
        self._state: dict[tuple[ModuleType, str], Any] = {
            at: {} if isinstance(value, dict) else None for at, value in _globals().items()
        }
        self.sizes = sizes
        self.vpp = sizes.virtual_pipeline or 1
        # Core seeds the device's own generator along with those it tracks.
        with self.active(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes.tensor,
                pipeline_model_parallel_size=sizes.pipeline,
                virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
                context_parallel_size=sizes.context,
                expert_model_parallel_size=sizes.expert,
                expert_tensor_parallel_size=sizes.expert_tensor,
                create_gloo_process_groups=False,
            )
            core_random.model_parallel_cuda_manual_seed(_SEED, force_reset_rng=True)
            self.tp = Part.of(parallel_state.get_tensor_model_parallel_group())
            self.pp = Part.of(parallel_state.get_pipeline_model_parallel_group())
            self.cp = Part.of(parallel_state.get_context_parallel_group())
            self.dp = Part.of(parallel_state.get_data_parallel_group())
            self.dp_cp = Part.of(parallel_state.get_data_parallel_group(with_context_parallel=True))
            self.ep = Part.of(parallel_state.get_expert_model_parallel_group())
            self.etp = Part.of(parallel_state.get_expert_tensor_parallel_group())
            self.expert_dp = Part.of(parallel_state.get_expert_data_parallel_group())

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device) -> CoreLayout:
        """The one of this process; engines of equal sizes share it."""
        found = cls._known.get(sizes)
        if found is None or found._world is not dist.group.WORLD:
            found = cls._known[sizes] = cls(sizes, device)
        return found

    @contextmanager
    def active(self) -> Iterator[None]:
        """Core works with this layout inside; what was there before is there again afterwards."""
        with CoreLayout._lock:
            before, there = CoreLayout._active, _globals()
            if before is self:
                yield
                return
            if before is not None:
                before._state = there
            _put(self._state)
            CoreLayout._active = self
            try:
                yield
            finally:
                self._state = _globals()
                _put(there if before is None else before._state)
                CoreLayout._active = before


def _globals() -> dict[tuple[ModuleType, str], Any]:
    """Core's state: the globals that its functions set."""
    return {
        (module, name): value
        for module in _MODULES
        for name, value in vars(module).items()
        if name.startswith("_") and name.isupper() and not isinstance(value, str | ModuleType)
    }


def _put(state: dict[tuple[ModuleType, str], Any]) -> None:
    for (module, name), value in state.items():
        setattr(module, name, value)
