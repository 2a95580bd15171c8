"""`@register`: how a worker's method is called on the whole group: who gets which data, and what comes back.

A dispatch mode is two functions. `dispatch_fn(group, *args, **kwargs)` turns the caller's arguments into one list entry
per rank: `(list of lists, dict of lists)`. `collect_fn(group, outputs)` turns the ranks' outputs into the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from verl.single_controller.base import dispatch

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "MethodSpec",
    "get_predefined_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "method_specs",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]

Method = TypeVar("Method", bound=Callable[..., Any])
LANES = ("compute", "control")
_SPEC = "_verl_method_spec"


@dataclass(frozen=True)
class DispatchMode:
    """A named dispatch mode; its functions are looked up when a call is made."""

    name: str


class Dispatch:
    """The known modes. `register_dispatch_mode` adds to them."""

    RANK_ZERO = DispatchMode("RANK_ZERO")
    """Arguments to rank 0 only; its result."""
    ONE_TO_ALL = DispatchMode("ONE_TO_ALL")
    """The same arguments to all ranks; a list of their results."""
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL")
    """Every argument is a list with one entry per rank; a list of their results."""
    DP_COMPUTE = DispatchMode("DP_COMPUTE")
    """As ALL_TO_ALL: data the caller has split over data-parallel ranks itself."""
    DP_COMPUTE_PROTO = DispatchMode("DP_COMPUTE_PROTO")
    """DataProto arguments are split over the ranks, others repeated; results are concatenated."""
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC")
    """DataProto arguments are split over the ranks; a list of the ranks' results."""


class Execute(Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class MethodSpec:
    """What `@register` was told about a method."""

    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]]
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    lane: str

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(dispatch_fn, collect_fn)"""
        mode = self.dispatch_mode
        known = DISPATCH_MODE_FN_REGISTRY[mode] if isinstance(mode, DispatchMode) else mode
        return known["dispatch_fn"], known["collect_fn"]


def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    lane: str = "compute",
) -> Callable[[Method], Method]:
    """Make a Worker method callable on its group. An `async def` one runs on the control lane, in the event loop that
    all such methods of the process share.

    Args:
        dispatch_mode: a `Dispatch` member, or `{"dispatch_fn": …, "collect_fn": …}`.
        execute_mode: all ranks, or rank 0 only.
        blocking: wait for the result, or return a `DataProtoFuture` with `get()`.
        materialize_futures: wait for futures among the arguments before dispatching.
        lane: "compute" (in order, may run collectives) or "control" (concurrent, answers at once).
    """
    if lane not in LANES:
        raise ValueError(f"register: lane {lane!r}; use one of {LANES}.")
    if isinstance(dispatch_mode, DispatchMode):
        get_predefined_dispatch_fn(dispatch_mode)
    elif not isinstance(dispatch_mode, Mapping) or not {"dispatch_fn", "collect_fn"} <= dispatch_mode.keys():
        raise ValueError("register: dispatch_mode is a Dispatch member or a dict with dispatch_fn and collect_fn.")
    if dispatch_mode is Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    spec = MethodSpec(dispatch_mode, execute_mode, blocking, materialize_futures, lane)

    def mark(method: Method) -> Method:
        setattr(method, _SPEC, spec)
        return method

    return mark


def method_specs(cls: type) -> dict[str, MethodSpec]:
    """The registered methods of a class. An override keeps the registration of the method it overrides."""
    found: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            spec = getattr(member, _SPEC, None)
            if spec is not None:
                found[name] = spec
    return {
        name: replace(spec, lane="control") if inspect.iscoroutinefunction(getattr(cls, name)) else spec
        for name, spec in found.items()
    }


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchMode:
    """Add a mode, from then on `Dispatch.<name>`."""
    mode = DispatchMode(name)
    if mode in DISPATCH_MODE_FN_REGISTRY:
        raise ValueError(f"register_dispatch_mode: {name!r} exists; change it with update_dispatch_mode.")
    DISPATCH_MODE_FN_REGISTRY[mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    setattr(Dispatch, name, mode)
    return mode


def update_dispatch_mode(
    mode: DispatchMode | str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of an existing mode."""
    known = DispatchMode(mode) if isinstance(mode, str) else mode
    get_predefined_dispatch_fn(known)
    DISPATCH_MODE_FN_REGISTRY[known] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def get_predefined_dispatch_fn(mode: DispatchMode) -> dict[str, Callable[..., Any]]:
    """`{"dispatch_fn": …, "collect_fn": …}` of a known mode."""
    if mode not in DISPATCH_MODE_FN_REGISTRY:
        known = sorted(mode.name for mode in DISPATCH_MODE_FN_REGISTRY)
        raise ValueError(f"dispatch mode: there is no {getattr(mode, 'name', mode)!r}; there are {known}.")
    return DISPATCH_MODE_FN_REGISTRY[mode]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """A dispatch mode over a mesh that the workers registered: data over its dp dimension, the same shard to the ranks
    of one tp/sp/pp group, results from one rank of each."""
    return {
        "dispatch_fn": partial(dispatch.split_over_mesh, mesh_name),
        "collect_fn": partial(dispatch.join_from_mesh, mesh_name),
    }


DISPATCH_MODE_FN_REGISTRY: dict[DispatchMode, dict[str, Callable[..., Any]]] = {
    mode: {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    for mode, dispatch_fn, collect_fn in [
        (Dispatch.RANK_ZERO, dispatch.repeat_for_all, dispatch.only_result),
        (Dispatch.ONE_TO_ALL, dispatch.repeat_for_all, dispatch.list_results),
        (Dispatch.ALL_TO_ALL, dispatch.one_entry_per_rank, dispatch.list_results),
        (Dispatch.DP_COMPUTE, dispatch.one_entry_per_rank, dispatch.list_results),
        (Dispatch.DP_COMPUTE_PROTO, dispatch.split_over_ranks, dispatch.join_results),
        (Dispatch.DP_COMPUTE_METRIC, dispatch.split_over_ranks, dispatch.list_results),
    ]
}
