"""`open_rollout`: start the rollout engine of a rank in this process or in its own process, or connect to a server."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from verl.config import ModelConfig, RolloutConfig
from verl.config.names import ROLLOUTS, read_user_declarations, rollout_traits
from verl.single_controller.base.worker import RankInfo
from verl.utils.device import resolve_dtype
from verl.utils.progress import activity
from verl.utils.stacks import Stack, own_stacks
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import BaseRollout, FollowerRollout
from verl.workers.rollout.process.process_rollout import ProcessRollout
from verl.workers.rollout.process.transport import EngineSpec


def open_rollout(
    model_path: str, model_config: ModelConfig, config: RolloutConfig, device: torch.device | str
) -> BaseRollout:
    """The rollout of this rank. A collective call of all ranks of the process group, if there is one.

    A third-party engine runs in its own process, which the first rank of each tensor-parallel group starts on the
    devices of the group.
    """
    device = torch.device(device)
    if config.server_urls:
        return _open_server(model_path, model_config, config, device)
    if config.name not in ROLLOUTS:  # a user's engine: only the driver has read its traits
        read_user_declarations([get_rollout_class(config.name).__module__])
    traits = rollout_traits(config.name)
    size = config.tensor_model_parallel_size
    if not traits.third_party or config.in_process:
        if traits.third_party and size > 1:
            raise ValueError(
                f"in_process: {config.name} runs in the worker's process at tensor_model_parallel_size 1 only, not at"
                f" {size}. Set in_process=False."
            )
        rollout_class: Any = get_rollout_class(config.name)
        with engine_start(config.name):
            return rollout_class(model_path, model_config, config, device)
    rank, placements = _gather_placements(device, size)
    if rank % size:
        return FollowerRollout(config, resolve_dtype(config.dtype, device))
    devices = _devices_of_group(placements[rank : rank + size], size)
    spec = EngineSpec(traits.import_path, model_path, model_config, config, device.type, torch.get_num_threads())
    return ProcessRollout(spec, _process_environment(traits.import_path, config, device, devices), device)


def _open_server(
    model_path: str, model_config: ModelConfig, config: RolloutConfig, device: torch.device
) -> BaseRollout:
    """Connect to the server of this rank's replica; of the ranks that share a server, only the first connects."""
    from verl.workers.rollout.url_rollout import URLRollout

    size, urls = config.tensor_model_parallel_size, config.server_urls
    info = RankInfo.from_environment()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (info.rank, info.world_size)
    ranks = max(ranks, size)
    if len(urls) * size != ranks:
        raise ValueError(
            f"server_urls: {len(urls)} servers for {ranks} ranks, tensor_model_parallel_size={size} ranks per server."
            f" Set {ranks // size} URLs, or tensor_model_parallel_size={ranks // len(urls)}."
        )
    if rank % size:
        return FollowerRollout(config, resolve_dtype(config.dtype, device))
    return URLRollout(model_path, model_config, config, device, urls[rank // size])


_Placement = tuple[str, str]
"""(hostname, device id as in CUDA_VISIBLE_DEVICES)."""


def _gather_placements(device: torch.device, size: int) -> tuple[int, list[_Placement]]:
    """This rank, and the placements of all ranks. Without a process group: rank 0, with this device and all following
    devices. A collective call."""
    host = socket.gethostname()
    devices = _visible_devices()[device.index or 0 :] if device.type == "cuda" else [""] * size
    if not dist.is_initialized():
        return 0, [(host, device_id) for device_id in devices]
    placements = [(host, devices[0])] * dist.get_world_size()
    dist.all_gather_object(placements, (host, devices[0]))
    return dist.get_rank(), placements


def _devices_of_group(placements: list[_Placement], size: int) -> list[str]:
    hosts = dict.fromkeys(host for host, _ in placements)
    if len(placements) < size or len(hosts) > 1:
        available = f"there are only {len(placements)}"
        problem = available if len(placements) < size else f"its ranks are on {' and '.join(hosts)}"
        raise ValueError(
            f"tensor_model_parallel_size: an engine needs {size} ranks on one machine, but {problem}."
            " Lower it, or choose n_gpus_per_node as a multiple of it."
        )
    return [device_id for _, device_id in placements]


def _visible_devices() -> list[str]:
    """The ids in CUDA_VISIBLE_DEVICES of the devices that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def _process_environment(
    class_path: str, config: RolloutConfig, device: torch.device, devices: list[str]
) -> Mapping[str, str]:
    """The complete environment of the engine's process: the environment of this process, variables that the engine
    requires, and its devices."""
    rank_variables = RankInfo(0, 1, 0, 1, "", 0).environment()  # the engine is not a member of the process group
    inherited = {name: value for name, value in os.environ.items() if name not in rank_variables}
    rollout_class: type[BaseRollout] = resolve_name(class_path)
    required = rollout_class.process_environment(config, device)
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**inherited, **required, "PYTHONPATH": paths}
    if device.type == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return environment


# ---------------------------------------------------------------- steps of a start

# The step of an engine's start, by functions of vLLM and SGLang on its stack.
_START_STEPS = {
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
_COMPILER_FOLDERS = ("/torch/_dynamo/", "/torch/_inductor/")
_IMPORT_FUNCTION = "_find_and_load"


@contextmanager
def engine_start(name: str) -> Iterator[None]:
    """Declare the start of the engine `name` by the calling thread as an activity, whose step is read from the thread's
    stack."""
    thread = threading.get_ident()

    def step() -> str | None:
        return start_step(own_stacks(thread).get(thread, ()))

    with activity(f"starting the {name} engine", step):
        yield


def start_step(stack: Stack) -> str | None:
    """The step of an engine's start with this stack; None: unknown."""
    for frame in stack:
        if frame.function != "<module>" and any(folder in frame.file for folder in _COMPILER_FOLDERS):
            return "compiling the model"
        if frame.function in _START_STEPS:
            return _START_STEPS[frame.function]
        if frame.function == _IMPORT_FUNCTION:
            return "importing packages"
    return None
