"""Out-of-memory errors that name the phase, the requested size, the memory in use, and the keys to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from verl.config.devices import host_memory_available
from verl.planning.remedies import UNKNOWN, applicable_remedies, is_read_by_engine, remedies, value_of
from verl.single_controller.base import Worker
from verl.utils.device import memory_in_use

_P = ParamSpec("_P")
_R = TypeVar("_R")
_REQUESTED_SIZE = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_MAX_REMEDIES = 14
# Names in the configuration of roles that have another name, or several blocks, in the configuration.
_CONFIG_NAMES = {
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_ref": ("actor", "rollout", "ref"),
    "rm": ("reward_model",),
}
_HOST_ALLOCATOR = "DefaultCPUAllocator"  # part of torch's message when host memory is exhausted


def phase_memory(phase: str, config_root: str = "") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a worker's method: out-of-memory errors are explained for `phase`. `config_root`: the key of the
    worker's `config` in the configuration of a run."""

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(method)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                worker: Any = args[0]
                message = explain(
                    phase, error, *_config_and_root(worker, config_root), worker.device, _colocated_roles(worker)
                )
                raise torch.OutOfMemoryError(message) from error
            except (MemoryError, RuntimeError) as error:
                if not isinstance(error, MemoryError) and _HOST_ALLOCATOR not in str(error):
                    raise
                worker = args[0]
                message = explain_host(phase, error, *_config_and_root(worker, config_root), _colocated_roles(worker))
                raise MemoryError(message) from error

        return run

    return decorate


def explain(
    phase: str,
    error: torch.OutOfMemoryError,
    config: Any,
    config_root: str,
    device: torch.device,
    roles: Collection[str] | None = None,
) -> str:
    """Return phase, requested size, memory in use, and the keys of `roles` (None: all) to change, cheapest first."""
    size = _REQUESTED_SIZE.search(str(error))
    lines = [f"{phase}: out of device memory. " + (f"{size[1]} more were requested; " if size else "")]
    lines[0] += _in_use(device)
    if size is None:
        lines.append(f"  {str(error).splitlines()[0] if str(error) else 'no size reported'}")
    lines.append("What helps, cheapest first:")
    advice = list(applicable_remedies(phase, partial(_value_of, config, root=config_root), roles))[:_MAX_REMEDIES]
    lines += [f"  {number}. {remedy.describe(now)}" for number, (remedy, now) in enumerate(advice, start=1)]
    if not advice:
        lines.append("  more devices, or a smaller model")
    return "\n".join(lines)


def explain_host(
    phase: str, error: Exception, config: Any, config_root: str, roles: Collection[str] | None = None
) -> str:
    """Return the explanation for host memory, without remedies that offload to host memory."""
    cause = str(error).splitlines()[0] if str(error) else "no size reported"
    free = f"{host_memory_available() / 2**30:.1f} GB are free now"
    return f"{phase}: out of host memory, {free}. {cause}\n{host_advice(phase, config, config_root, roles)}"


def host_advice(phase: str, config: Any, config_root: str = "", roles: Collection[str] | None = None) -> str:
    """Return the keys to change if a phase needs more host memory than available, cheapest first."""
    value = partial(_value_of, config, root=config_root)
    applicable = applicable_remedies(phase, value, roles)
    advice = [remedy.describe(now) for remedy, now in applicable if "offload" not in remedy.key]
    read_keys = [remedy.key for remedy in remedies(phase, roles) if is_read_by_engine(remedy, value)]
    offloads = [key for key in read_keys if "offload" in key]
    active = [key for key in offloads if value(key) is True]
    steps = [
        *advice[:_MAX_REMEDIES],
        *(f"{key}=False" for key in active),
        "fewer ranks on this machine, or more memory",
    ]
    return "\n".join(["What helps, cheapest first:", *(f"  {i}. {step}" for i, step in enumerate(steps, start=1))])


def _in_use(device: torch.device) -> str:
    if device.type != "cuda":
        return "the memory in use is not reported on this device."
    peak, now = memory_in_use(device)
    free, total = torch.cuda.mem_get_info(device)
    gb = 2**30
    return (
        f"this process holds {now / gb:.1f} GB (peak {peak / gb:.1f}), and {free / gb:.1f} of the device's "
        f"{total / gb:.1f} GB are free."
    )


def _value_of(config: Any, key: str, root: str) -> Any:
    """Return the value of a full key in `config`, the block at the key `root`; UNKNOWN for keys of other blocks."""
    if root and not key.startswith(f"{root}."):
        return UNKNOWN
    return value_of(config, key.removeprefix(f"{root}.") if root else key)


def _config_and_root(worker: Any, config_root: str) -> tuple[Any, str]:
    """Return the configuration of the run and "", or, if it is unknown, the worker's `config` and `config_root`."""
    run = worker.run_config if isinstance(worker, Worker) else None
    return (worker.config, config_root) if run is None else (run, "")


def _colocated_roles(worker: Any) -> list[str] | None:
    """Return the roles that share the worker's process and device, by their configuration names; None: unknown."""
    names = worker.colocated if isinstance(worker, Worker) else ()
    return [role for name in names for role in _CONFIG_NAMES.get(name, (name,))] or None
