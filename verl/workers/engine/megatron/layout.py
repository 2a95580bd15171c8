"""CoreLayout: Megatron-Core's process groups and global state for one parallel layout.

Core stores them in module globals, so a process can have only one layout at a time. Here, an actor and a critic with
different layouts may share a process: each layout has its own copy of the globals, which `activate` installs.
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
# Core requires a seed for its random states. It only affects dropout, which is disabled.
_SEED = 1


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel groups; the remaining dimension is data-parallel."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @classmethod
    def from_config(cls, config: MegatronConfig) -> ParallelSizes:
        return cls(
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.virtual_pipeline_model_parallel_size,
            config.context_parallel_size,
            config.expert_model_parallel_size,
            config.expert_tensor_parallel_size,
        )


@dataclass(frozen=True)
class GroupRank:
    """This rank's position in one of its groups."""

    rank: int
    size: int
    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks in group order."""

    @classmethod
    def from_group(cls, group: dist.ProcessGroup) -> GroupRank:
        return cls(dist.get_rank(group), dist.get_world_size(group), group, tuple(dist.get_process_group_ranks(group)))


class CoreLayout:
    """Core's groups for one set of sizes, with the global state that belongs to them. Creating one is a collective."""

    _instances: ClassVar[dict[ParallelSizes, CoreLayout]] = {}
    _active: ClassVar[CoreLayout | None] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, sizes: ParallelSizes, device: torch.device) -> None:
        self._world = dist.group.WORLD
        self._state: dict[tuple[ModuleType, str], Any] = {
            key: {} if isinstance(value, dict) else None for key, value in _globals().items()
        }
        self.sizes = sizes
        self.vpp = sizes.virtual_pipeline or 1
        # Core also seeds torch's default generators: `fork_rng` restores them.
        with self.activate(), torch.random.fork_rng([device] if device.type == "cuda" else []):
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
            self.tp = GroupRank.from_group(parallel_state.get_tensor_model_parallel_group())
            self.pp = GroupRank.from_group(parallel_state.get_pipeline_model_parallel_group())
            self.cp = GroupRank.from_group(parallel_state.get_context_parallel_group())
            self.dp = GroupRank.from_group(parallel_state.get_data_parallel_group())
            self.dp_cp = GroupRank.from_group(parallel_state.get_data_parallel_group(with_context_parallel=True))
            self.ep = GroupRank.from_group(parallel_state.get_expert_model_parallel_group())
            self.etp = GroupRank.from_group(parallel_state.get_expert_tensor_parallel_group())
            self.expert_dp = GroupRank.from_group(parallel_state.get_expert_data_parallel_group())

    @classmethod
    def get(cls, sizes: ParallelSizes, device: torch.device) -> CoreLayout:
        """Return the layout of this process for `sizes`, created at the first call."""
        layout = cls._instances.get(sizes)
        if layout is None or layout._world is not dist.group.WORLD:
            layout = cls._instances[sizes] = cls(sizes, device)
        return layout

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Context manager: install this layout's copy of Core's globals; restore the previous ones at exit.

        Only one thread at a time can be in such a context; it may be nested.
        """
        with CoreLayout._lock:
            previous, previous_state = CoreLayout._active, _globals()
            if previous is self:
                yield
                return
            if previous is not None:
                previous._state = previous_state
            _set_globals(self._state)
            CoreLayout._active = self
            try:
                yield
            finally:
                self._state = _globals()
                _set_globals(previous_state if previous is None else previous._state)
                CoreLayout._active = previous


def _globals() -> dict[tuple[ModuleType, str], Any]:
    """Return Core's state: the module globals that its functions set."""
    return {
        (module, name): value
        for module in _MODULES
        for name, value in vars(module).items()
        if name.startswith("_") and name.isupper() and not isinstance(value, str | ModuleType)
    }


def _set_globals(state: dict[tuple[ModuleType, str], Any]) -> None:
    for (module, name), value in state.items():
        setattr(module, name, value)
