"""A stand-in for SGLang's kernels, which are built for GPUs and some x86 CPUs: SGLang's plain torch paths need none."""

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("sgl_kernel", "DEF")
for _schema in ("init_cpu_threads_env(str cores) -> ()", "initialize(int size, int rank) -> ()"):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], lambda *ignored: None, "CompositeExplicitAutograd")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: tests/engines/shims has no kernels.")

    return missing
