"""`@register` and dispatch modes: how a call on a group is split into calls on its ranks, and how results are joined.

A dispatch mode is two functions. `dispatch_fn(group, *args, **kwargs)` turns the caller's arguments into lists
with one entry per rank: `(list of lists, dict of lists)`. `collect_fn(group, outputs)` turns the ranks' outputs into
the result.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from verl.protocol import DataProto, DataProtoConfig

Method = TypeVar("Method", bound=Callable[..., Any])
LANES = ("compute", "control")
_SPEC = "_verl_method_spec"


@dataclass(frozen=True)
class DispatchMode:
    """A named dispatch mode; its functions are looked up at every call."""

    name: str


class Dispatch:
    """The predefined modes; `register_dispatch_mode` adds more."""

    RANK_ZERO = DispatchMode("RANK_ZERO")
    """Arguments to rank 0 only; its result."""
    ONE_TO_ALL = DispatchMode("ONE_TO_ALL")
    """The same arguments to all ranks; a list of their results."""
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL")
    """Every argument is a list with one entry per rank; a list of their results."""
    DP_COMPUTE = DispatchMode("DP_COMPUTE")
    """Same as ALL_TO_ALL, for data that the caller has split over data-parallel ranks."""
    DP_COMPUTE_PROTO = DispatchMode("DP_COMPUTE_PROTO")
    """DataProto arguments are split over the ranks, others repeated; results are concatenated."""
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC")
    """DataProto arguments are split over the ranks; a list of the ranks' results."""


class Execute(Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


PerRank = tuple[list[list[Any]], dict[str, list[Any]]]
"""Positional and keyword arguments as lists with one entry per rank."""


@dataclass(frozen=True)
class MeshPlace:
    """Position of a rank in a named mesh: which data shard it gets, and whether it returns the result of that shard."""

    dp_rank: int
    collect: bool


class DispatchGroup(Protocol):
    """The part of a worker group that dispatch and collect functions use."""

    @property
    def world_size(self) -> int: ...

    def mesh_places(self, name: str) -> list[MeshPlace]: ...


@dataclass(frozen=True)
class BatchShard:
    """The rows of a batch for one rank. The worker's method receives them as a plain DataProto."""

    data: DataProto
    fillers: int = 0
    """Number of filler rows at the end; the worker masks them and drops them from its result."""
    collect: bool = True
    """Whether this rank returns its result (one rank of each tp/sp/pp group)."""


@dataclass(frozen=True)
class MethodSpec:
    """The arguments of `@register` for a method."""

    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]]
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    lane: str

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(dispatch_fn, collect_fn)"""
        mode = self.dispatch_mode
        functions = DISPATCH_MODE_FN_REGISTRY[mode] if isinstance(mode, DispatchMode) else mode
        return functions["dispatch_fn"], functions["collect_fn"]


def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    lane: str = "compute",
) -> Callable[[Method], Method]:
    """Make a Worker method callable on its group.

    An `async def` method runs on the control lane, in one event loop shared by all async methods of the process.

    Args:
        dispatch_mode: a `Dispatch` member, or `{"dispatch_fn": …, "collect_fn": …}`.
        execute_mode: all ranks, or rank 0 only.
        blocking: wait for the result, or return a `DataProtoFuture` with `get()`.
        materialize_futures: wait for futures among the arguments before dispatching.
        lane: "compute" (in submission order, may run collectives) or "control" (concurrent with compute calls).
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
    specs: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            spec = getattr(member, _SPEC, None)
            if spec is not None:
                specs[name] = spec
    return {
        name: replace(spec, lane="control") if inspect.iscoroutinefunction(getattr(cls, name)) else spec
        for name, spec in specs.items()
    }


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchMode:
    """Add a mode as `Dispatch.<name>`."""
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
    mode = DispatchMode(mode) if isinstance(mode, str) else mode
    get_predefined_dispatch_fn(mode)  # raises if it does not exist
    DISPATCH_MODE_FN_REGISTRY[mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def get_predefined_dispatch_fn(mode: DispatchMode) -> dict[str, Callable[..., Any]]:
    """`{"dispatch_fn": …, "collect_fn": …}` of a known mode."""
    if mode not in DISPATCH_MODE_FN_REGISTRY:
        known = sorted(mode.name for mode in DISPATCH_MODE_FN_REGISTRY)
        raise ValueError(f"dispatch mode {getattr(mode, 'name', mode)!r} does not exist; known: {known}.")
    return DISPATCH_MODE_FN_REGISTRY[mode]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """A dispatch mode over a mesh that the workers registered: data is split over its dp dimension, the ranks of one
    tp/sp/pp group get the same shard, and one rank of each group returns the result."""
    return {
        "dispatch_fn": partial(split_over_mesh, mesh_name),
        "collect_fn": partial(join_from_mesh, mesh_name),
    }


def repeat_for_all(group: DispatchGroup, *args: Any, **kwargs: Any) -> PerRank:
    """The same arguments for every rank."""
    return [[arg] * group.world_size for arg in args], {key: [arg] * group.world_size for key, arg in kwargs.items()}


def one_entry_per_rank(group: DispatchGroup, *args: Any, **kwargs: Any) -> PerRank:
    """Arguments that already are lists with one entry per rank."""
    named = [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]
    for name, arg in named:
        if not isinstance(arg, list | tuple) or len(arg) != group.world_size:
            actual = f"{len(arg)} entries" if isinstance(arg, list | tuple) else f"a {type(arg).__name__}"
            raise ValueError(
                f"{name} must be a list with one entry for each of the {group.world_size} ranks; it is {actual}."
            )
    return [list(arg) for arg in args], {key: list(arg) for key, arg in kwargs.items()}


def split_over_ranks(group: DispatchGroup, *args: Any, **kwargs: Any) -> PerRank:
    """Every rank is data-parallel: rank i gets shard i of each DataProto; other arguments are repeated."""
    return _split([(rank, True) for rank in range(group.world_size)], args, kwargs)


def split_over_mesh(mesh_name: str, group: DispatchGroup, *args: Any, **kwargs: Any) -> PerRank:
    """Split over the dp dimension of a registered mesh; ranks with the same dp rank get the same shard."""
    return _split([(place.dp_rank, place.collect) for place in _places(group, mesh_name)], args, kwargs)


def only_result(group: DispatchGroup, outputs: list[Any]) -> Any:
    """The result of the only rank."""
    return outputs[0]


def list_results(group: DispatchGroup, outputs: list[Any]) -> list[Any]:
    """The list of the ranks' results."""
    return outputs


def join_results(group: DispatchGroup, outputs: list[Any]) -> Any:
    """One DataProto of all ranks' rows, in rank order."""
    return _join(outputs)


def join_from_mesh(mesh_name: str, group: DispatchGroup, outputs: list[Any]) -> Any:
    """One DataProto of all shards' rows, each from the rank that collects for its shard."""
    places = _places(group, mesh_name)
    collecting = sorted((place.dp_rank, rank) for rank, place in enumerate(places) if place.collect)
    return _join([outputs[rank] for _, rank in collecting])


def _split(places: Sequence[tuple[int, bool]], args: Sequence[Any], kwargs: dict[str, Any]) -> PerRank:
    dp_size = max(dp_rank for dp_rank, _ in places) + 1
    named = [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]
    lengths = {name: len(arg) for name, arg in named if isinstance(arg, DataProto)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all batches of one call must have the same number of rows; got {lengths}.")

    def per_rank(arg: Any) -> list[Any]:
        if not isinstance(arg, DataProto):
            return [arg] * len(places)
        shards = _shards(arg, dp_size)
        return [BatchShard(*shards[dp_rank], collect=collect) for dp_rank, collect in places]

    return [per_rank(arg) for arg in args], {key: per_rank(arg) for key, arg in kwargs.items()}


def _shards(data: DataProto, dp_size: int) -> list[tuple[DataProto, int]]:
    """`dp_size` shards of equal size (views), each with its number of filler rows; only the last ones have any."""
    rows, size = len(data), math.ceil(len(data) / dp_size)
    if rows == 0:
        raise ValueError("the batch is empty: it cannot be split over the ranks.")
    if rows % dp_size and not data.is_padding_enabled():
        raise ValueError(
            f"{rows} rows do not divide over {dp_size} data-parallel ranks, and auto padding is off"
            f" (DataProtoConfig.auto_padding is {DataProtoConfig.auto_padding})."
            " Pad the batch, or create it with auto_padding=True."
        )
    shards = []
    for start in range(0, dp_size * size, size):
        fillers = min(size, max(0, start + size - rows))
        index: Any = slice(start, start + size) if fillers == 0 else np.arange(start, start + size) % rows
        shards.append((data._take(index), fillers))
    return shards


def _places(group: DispatchGroup, mesh_name: str) -> list[MeshPlace]:
    places = group.mesh_places(mesh_name)
    collecting = sorted(place.dp_rank for place in places if place.collect)
    if collecting != list(range(len(collecting))) or {place.dp_rank for place in places} != set(collecting):
        raise ValueError(
            f"mesh {mesh_name!r}: each dp_rank needs exactly one rank that collects; registered (dp_rank, collect):"
            f" {[(place.dp_rank, place.collect) for place in places]}."
        )
    return places


def _join(outputs: list[Any]) -> Any:
    if all(output is None for output in outputs):
        return None
    if not all(isinstance(output, DataProto) for output in outputs):
        kinds = sorted({type(output).__name__ for output in outputs})
        raise TypeError(
            f"a method whose results are concatenated must return a DataProto on every rank; it returned {kinds}."
        )
    return DataProto.concat(outputs)


DISPATCH_MODE_FN_REGISTRY: dict[DispatchMode, dict[str, Callable[..., Any]]] = {
    mode: {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    for mode, dispatch_fn, collect_fn in [
        (Dispatch.RANK_ZERO, repeat_for_all, only_result),
        (Dispatch.ONE_TO_ALL, repeat_for_all, list_results),
        (Dispatch.ALL_TO_ALL, one_entry_per_rank, list_results),
        (Dispatch.DP_COMPUTE, one_entry_per_rank, list_results),
        (Dispatch.DP_COMPUTE_PROTO, split_over_ranks, join_results),
        (Dispatch.DP_COMPUTE_METRIC, split_over_ranks, list_results),
    ]
}
