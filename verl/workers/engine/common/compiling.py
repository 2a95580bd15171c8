"""A model's layers compiled, for packed tokens on CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer's pass for any number of tokens; layers of one kind share the code."""
    for layer in layers:
        layer.compile(dynamic=True)


@contextmanager
def running_compiled(compiled: bool, name: str) -> Iterator[None]:
    """Around a pass of compiled layers: a compiler that fails (or is missing) is no riddle. `name` of the model."""
    if not compiled:
        yield
        return
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        raise RuntimeError(
            f"use_torch_compile: the layers of {name} could not be compiled "
            f"({str(error).strip().splitlines()[0]}). Set use_torch_compile=False."
        ) from error


def eager(compiled: bool) -> AbstractContextManager[Any]:
    """For a few tokens: compiling a pass of their kind would take longer than all of them together."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
