"""The names of tensordict that verl uses, imported without torch's compiler.

On import, tensordict registers a few functions with the compiler, which imports the compiler: seconds of CPU time, also
in processes that compile nothing. Here these calls are deferred until the process imports the compiler. Creating an
optimizer also imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

__all__ = ["NonTensorStack", "TensorDict", "TensorDictBase", "is_non_tensor"]

_COMPILER = "torch._dynamo"
_DEFERRED = ("allow_in_graph", "assume_constant_result")


class _CompilerFinder(importlib.abc.MetaPathFinder):
    """Applies the deferred calls when the compiler is imported.

    It stays in `sys.meta_path`: other threads may be iterating over that list, and a search for the compiler does not
    imply that it is imported.
    """

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self._calls = calls

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _COMPILER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_apply(module: ModuleType) -> None:
            execute(module)
            _apply(self._calls)

        spec.loader.exec_module = execute_and_apply  # type: ignore[method-assign]
        return spec


def _apply(calls: list[tuple[str, Any]]) -> None:
    for name, argument in calls:
        getattr(torch.compiler, name)(argument)


def _import_tensordict() -> None:
    calls: list[tuple[str, Any]] = []

    def deferred(name: str) -> Callable[[Any], Any]:
        def call_later(function: Any) -> Any:
            if _COMPILER in sys.modules:  # tensordict may keep this function and call it later
                return originals[name](function)
            calls.append((name, function))
            return function

        return call_later

    originals = {name: getattr(torch.compiler, name) for name in _DEFERRED}
    try:
        for name in _DEFERRED:
            setattr(torch.compiler, name, deferred(name))
        importlib.import_module("tensordict")
    finally:
        for name, function in originals.items():
            setattr(torch.compiler, name, function)
    if _COMPILER in sys.modules:
        _apply(calls)
    else:
        sys.meta_path.insert(0, _CompilerFinder(calls))


if not {"tensordict", _COMPILER} & set(sys.modules):
    _import_tensordict()

from tensordict import NonTensorStack, TensorDict, TensorDictBase, is_non_tensor  # noqa: E402
