"""A stand-in for SGLang's kernels, which are built for GPUs and some x86 CPUs: SGLang's plain torch paths need few."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _nothing(*ignored: Any) -> None:
    """Where threads run and memory is shared is left to the system."""


def _all_reduce(data: torch.Tensor, operation: int) -> None:
    dist.all_reduce(data)


def _all_gather(data: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(data) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, data.contiguous())
    return torch.cat(parts, dim)


_library = torch.library.Library("sgl_kernel", "DEF")
for _schema, _function in {
    "init_cpu_threads_env(str cores) -> ()": _nothing,
    "initialize(int size, int rank) -> ()": _nothing,
    "shm_allreduce(Tensor(a!) data, int operation) -> ()": _all_reduce,
    "shm_allgather(Tensor data, int dim) -> Tensor": _all_gather,
}.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: tests/engines/shims has no kernels.")

    return missing
