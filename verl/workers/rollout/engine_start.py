"""Declare the start of a rollout engine as an activity; its step is read from the stack of the starting thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.liveness import activity
from verl.utils.stacks import Stack, own_stacks

__all__ = ["engine_start", "step_of"]

# Functions of vLLM and SGLang, and the step that a stack with them is in.
_STEPS = {
    "create_engine_config": "reading the model's configuration",
    "init_device": "initialising the device",
    "init_distributed_environment": "connecting its workers",
    "wait_for_ready": "starting its worker processes",
    "load_model": "loading weights",
    "load_weights": "loading weights",
    "profile_run": "profiling memory",
    "determine_available_memory": "profiling memory",
    "initialize_kv_cache": "allocating the KV cache",
    "initialize_from_config": "allocating the KV cache",
    "init_memory_pool": "allocating the KV cache",
    "kernel_warmup": "warming up kernels",
    "compile_or_warm_up_model": "warming up",
    "capture_model": "capturing CUDA graphs",
    "init_device_graphs": "capturing CUDA graphs",
}
_COMPILER = ("/torch/_dynamo/", "/torch/_inductor/")
_IMPORT = "_find_and_load"


@contextmanager
def engine_start(name: str) -> Iterator[None]:
    """Declare that the calling thread starts the engine `name`."""
    thread = threading.get_ident()

    def step() -> str | None:
        return step_of(own_stacks(thread).get(thread, ()))

    with activity(f"starting the {name} engine", step):
        yield


def step_of(stack: Stack) -> str | None:
    """Return the step that this stack is in; None: not known."""
    for frame in stack:
        if frame.function != "<module>" and any(place in frame.file for place in _COMPILER):
            return "compiling the model"
        if frame.function in _STEPS:
            return _STEPS[frame.function]
        if frame.function == _IMPORT:
            return "importing packages"
    return None
