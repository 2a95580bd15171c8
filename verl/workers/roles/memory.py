"""When a phase runs out of device memory, the error says which, how much was asked for, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from verl.config.devices import host_memory_available
from verl.planning.remedies import UNKNOWN, helpful, is_read, remedies, value_of
from verl.single_controller.base import Worker
from verl.utils.device import memory_in_use

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_MOST_REMEDIES = 14
# Roles that are called otherwise in the configuration, or are several there.
_PARTS = {
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_ref": ("actor", "rollout", "ref"),
    "rm": ("reward_model",),
}
_HOST = "DefaultCPUAllocator"  # what torch's message has when the machine's own memory is full


def phase_memory(phase: str, at: str = "") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """For a worker's method: what it runs out of memory in is `phase`; `at` is the path of the worker's `config`."""

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(method)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                worker: Any = args[0]
                told = explain(phase, error, *_known_to(worker, at), worker.device, _roles_beside(worker))
                raise torch.OutOfMemoryError(told) from error
            except (MemoryError, RuntimeError) as error:
                if not isinstance(error, MemoryError) and _HOST not in str(error):
                    raise
                worker = args[0]
                raise MemoryError(explain_host(phase, error, *_known_to(worker, at), _roles_beside(worker))) from error

        return run

    return decorate


def explain(
    phase: str,
    error: torch.OutOfMemoryError,
    config: Any,
    at: str,
    device: torch.device,
    roles: Collection[str] | None = None,
) -> str:
    """The phase, the size, what was in use, and the keys to change in the order of what they cost: of `roles`, if it is
    known which are there."""
    asked = _ASKED.search(str(error))
    lines = [f"{phase}: out of device memory. " + (f"{asked[1]} more were asked for; " if asked else "")]
    lines[0] += _in_use(device)
    if asked is None:
        lines.append(f"  {str(error).splitlines()[0] if str(error) else 'no size was given'}")
    lines.append("What helps, cheapest first:")
    found = list(helpful(phase, partial(_value, config, at=at), roles))[:_MOST_REMEDIES]
    lines += [f"  {number}. {remedy.describe(now)}" for number, (remedy, now) in enumerate(found, start=1)]
    if not found:
        lines.append("  more devices, or a smaller model")
    return "\n".join(lines)


def explain_host(phase: str, error: Exception, config: Any, at: str, roles: Collection[str] | None = None) -> str:
    """The same for the machine's own memory; what moves from a device to it would not help."""
    said = str(error).splitlines()[0] if str(error) else "no size was given"
    free = f"{host_memory_available() / 2**30:.1f} GB are free now"
    return f"{phase}: out of host memory, {free}. {said}\n{host_advice(phase, config, at, roles)}"


def host_advice(phase: str, config: Any, at: str = "", roles: Collection[str] | None = None) -> str:
    """The keys to change when a phase needs more of the machine's own memory than there is, cheapest first."""
    value = partial(_value, config, at=at)
    found = [remedy.describe(now) for remedy, now in helpful(phase, value, roles) if "offload" not in remedy.key]
    offloads = [each.key for each in remedies(phase, roles) if "offload" in each.key and is_read(each, value)]
    moved = [key for key in offloads if value(key) is True]
    steps = [*found[:_MOST_REMEDIES], *(f"{key}=False" for key in moved), "fewer ranks on this machine, or more memory"]
    return "\n".join(["What helps, cheapest first:", *(f"  {i}. {step}" for i, step in enumerate(steps, start=1))])


def _in_use(device: torch.device) -> str:
    if device.type != "cuda":
        return "the device does not say how much is in use."
    peak, now = memory_in_use(device)
    free, total = torch.cuda.mem_get_info(device)
    gb = 2**30
    return (
        f"this process holds {now / gb:.1f} GB (most so far {peak / gb:.1f}), and {free / gb:.1f} of the device's "
        f"{total / gb:.1f} GB are free."
    )


def _value(config: Any, key: str, at: str) -> Any:
    """The value of a key if it lies below `at`, where this worker's configuration begins; else UNKNOWN."""
    if at and not key.startswith(f"{at}."):
        return UNKNOWN
    return value_of(config, key.removeprefix(f"{at}.") if at else key)


def _known_to(worker: Any, at: str) -> tuple[Any, str]:
    """The configuration that a worker knows, and where it begins: the whole run's, or its own, at `at`."""
    run = worker.run_config if isinstance(worker, Worker) else None
    return (worker.config, at) if run is None else (run, "")


def _roles_beside(worker: Any) -> list[str] | None:
    """The roles in a worker's process, which share its device, as the configuration calls them; None: not known."""
    names = worker.colocated if isinstance(worker, Worker) else ()
    return [role for name in names for role in _PARTS.get(name, (name,))] or None
