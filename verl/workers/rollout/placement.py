"""Where a rollout's engine runs: in this process, in one of its own beside it, or elsewhere already, by URL."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from verl.config import ModelConfig, RolloutConfig
from verl.config.names import ROLLOUTS
from verl.single_controller.base.worker import RankInfo
from verl.utils.device import resolve_dtype
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.engine_start import engine_start
from verl.workers.rollout.following_rank import FollowingRank
from verl.workers.rollout.process.messages import Recipe
from verl.workers.rollout.process.process_rollout import ProcessRollout

__all__ = ["open_rollout"]


def open_rollout(
    model_path: str, model_config: ModelConfig, config: RolloutConfig, device: torch.device | str
) -> BaseRollout:
    """The rollout of this rank. A collective of all ranks of the process group, where there is one.

    Another project's engine has a process of its own, which the first rank of each tensor-parallel set starts on the
    devices of the set.
    """
    device = torch.device(device)
    if config.server_urls:
        return _joined(model_path, model_config, config, device)
    row = ROLLOUTS.get(config.name)
    if row is None or not row.foreign or config.in_process:
        if row is not None and row.foreign and config.tensor_model_parallel_size > 1:
            raise ValueError(
                f"in_process: {config.name} runs in the worker's process at tensor_model_parallel_size 1 only, not at"
                f" {config.tensor_model_parallel_size}. Set in_process=False."
            )
        make: Any = get_rollout_class(config.name)
        with engine_start(config.name):
            return make(model_path, model_config, config, device)
    size, rank, places = config.tensor_model_parallel_size, *_places(device, config.tensor_model_parallel_size)
    if rank % size:
        return FollowingRank(config, resolve_dtype(config.dtype, device))
    devices = _devices_of_set(places[rank : rank + size], size)
    recipe = Recipe(row.at, model_path, model_config, config, device.type, torch.get_num_threads())
    return ProcessRollout(recipe, _environment(row.at, config, device, devices), device)


def _joined(model_path: str, model_config: ModelConfig, config: RolloutConfig, device: torch.device) -> BaseRollout:
    """The server of this rank's replica, by URL; the first of the ranks that share it speaks to it."""
    from verl.workers.rollout.url_rollout import URLRollout

    size, urls = config.tensor_model_parallel_size, config.server_urls
    here = RankInfo.from_environment()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (here.rank, here.world_size)
    ranks = max(ranks, size)
    if len(urls) * size != ranks:
        raise ValueError(
            f"server_urls: {len(urls)} servers for {ranks} ranks, of which tensor_model_parallel_size={size} share one."
            f" Name {ranks // size}, or let {ranks // len(urls)} ranks share each."
        )
    if rank % size:
        return FollowingRank(config, resolve_dtype(config.dtype, device))
    return URLRollout(model_path, model_config, config, device, urls[rank // size])


_Place = tuple[str, str]
"""(host, what it calls the device)."""


def _places(device: torch.device, size: int) -> tuple[int, list[_Place]]:
    """This rank, and where each of all is. A process that is alone has the devices from its own on. A collective."""
    host = socket.gethostname()
    devices = _visible_devices()[device.index or 0 :] if device.type == "cuda" else [""] * size
    if not dist.is_initialized():
        return 0, [(host, name) for name in devices]
    places = [(host, devices[0])] * dist.get_world_size()
    dist.all_gather_object(places, (host, devices[0]))
    return dist.get_rank(), places


def _devices_of_set(places: list[_Place], size: int) -> list[str]:
    hosts = dict.fromkeys(host for host, _ in places)
    if len(places) < size or len(hosts) > 1:
        where = f"there are {len(places)}" if len(places) < size else f"they are on {' and '.join(hosts)}"
        raise ValueError(
            f"tensor_model_parallel_size: an engine of {size} ranks runs on one machine, and here {where}."
            " Lower it, or choose n_gpus_per_node as a multiple of it."
        )
    return [name for _, name in places]


def _visible_devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the devices that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def _environment(at: str, config: RolloutConfig, device: torch.device, devices: list[str]) -> Mapping[str, str]:
    """All of the engine's process: what the engine needs, unless the user has set it otherwise, and its devices."""
    ranks = RankInfo(0, 1, 0, 1, "", 0).environment()  # of this process's group, which the engine is no member of
    own = {name: value for name, value in os.environ.items() if name not in ranks}
    package = at.partition(":")[0].rpartition(".")[0]
    needed: Mapping[str, str] = {}
    if find_spec(f"{package}.environment") is not None:
        needed = import_module(f"{package}.environment").environment(config, device)
    paths = os.pathsep.join(path for path in sys.path if path)
    found = {**own, **needed, "PYTHONPATH": paths}
    return found | {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if device.type == "cuda" else found
