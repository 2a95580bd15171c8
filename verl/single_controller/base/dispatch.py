"""The built-in dispatch and collect functions: repeat, split over data-parallel ranks, join."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from verl.protocol import DataProto, DataProtoConfig

PerRank = tuple[list[list[Any]], dict[str, list[Any]]]


@dataclass(frozen=True)
class MeshPlace:
    """A rank's place in a named mesh: which data shard it gets, and whether its result stands for that shard."""

    dp_rank: int
    collect: bool


class Group(Protocol):
    """What splitting and joining need to know of a worker group."""

    @property
    def world_size(self) -> int: ...

    def mesh_places(self, name: str) -> list[MeshPlace]: ...


@dataclass(frozen=True)
class Shard:
    """One rank's rows of a batch on its way to the worker, where it becomes a plain DataProto."""

    data: DataProto
    fillers: int = 0
    """How many rows at the end only fill up the shard; the worker masks them and drops them from its result."""
    collect: bool = True
    """Whether this rank's result is wanted (one rank of each tp/sp/pp group)."""


def repeat_for_all(group: Group, *args: Any, **kwargs: Any) -> PerRank:
    """The same arguments for every rank."""
    return [[arg] * group.world_size for arg in args], {key: [arg] * group.world_size for key, arg in kwargs.items()}


def one_entry_per_rank(group: Group, *args: Any, **kwargs: Any) -> PerRank:
    """The caller gives lists with one entry per rank."""
    named = [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]
    for name, arg in named:
        if not isinstance(arg, list | tuple) or len(arg) != group.world_size:
            what = f"{len(arg)} entries" if isinstance(arg, list | tuple) else f"a {type(arg).__name__}"
            raise ValueError(
                f"{name} must be a list with one entry for each of the {group.world_size} ranks; it is {what}."
            )
    return [list(arg) for arg in args], {key: list(arg) for key, arg in kwargs.items()}


def split_over_ranks(group: Group, *args: Any, **kwargs: Any) -> PerRank:
    """Every rank is data-parallel: rank i gets shard i of each DataProto; other arguments are repeated."""
    return _split([(rank, True) for rank in range(group.world_size)], args, kwargs)


def split_over_mesh(mesh_name: str, group: Group, *args: Any, **kwargs: Any) -> PerRank:
    """Shards over the dp dimension of a registered mesh; ranks at one dp position get the same shard."""
    return _split([(place.dp_rank, place.collect) for place in _places(group, mesh_name)], args, kwargs)


def only_result(group: Group, outputs: list[Any]) -> Any:
    """What the one rank returned."""
    return outputs[0]


def list_results(group: Group, outputs: list[Any]) -> list[Any]:
    """What each rank returned."""
    return outputs


def join_results(group: Group, outputs: list[Any]) -> Any:
    """One DataProto of all ranks' rows, in rank order."""
    return _join(outputs)


def join_from_mesh(mesh_name: str, group: Group, outputs: list[Any]) -> Any:
    """One DataProto of all shards' rows, each from the rank that answers for its shard."""
    places = _places(group, mesh_name)
    collecting = sorted((place.dp_rank, rank) for rank, place in enumerate(places) if place.collect)
    return _join([outputs[rank] for _, rank in collecting])


def _split(places: Sequence[tuple[int, bool]], args: Sequence[Any], kwargs: dict[str, Any]) -> PerRank:
    dp_size = max(dp_rank for dp_rank, _ in places) + 1
    named = [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]
    lengths = {name: len(arg) for name, arg in named if isinstance(arg, DataProto)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"batches of one call must have equally many rows to be split alike; got {lengths}.")

    def per_rank(arg: Any) -> list[Any]:
        if not isinstance(arg, DataProto):
            return [arg] * len(places)
        shards = _shards(arg, dp_size)
        return [Shard(*shards[dp_rank], collect=collect) for dp_rank, collect in places]

    return [per_rank(arg) for arg in args], {key: per_rank(arg) for key, arg in kwargs.items()}


def _shards(data: DataProto, dp_size: int) -> list[tuple[DataProto, int]]:
    """`dp_size` equal shards (views) with their number of filler rows; the last ones are filled where needed."""
    rows, size = len(data), math.ceil(len(data) / dp_size)
    if rows == 0:
        raise ValueError("the batch is empty: there is nothing to split over the ranks.")
    if rows % dp_size and not data.is_padding_enabled():
        raise ValueError(
            f"{rows} rows do not divide over {dp_size} data-parallel ranks, and filling is off"
            f" (DataProtoConfig.auto_padding is {DataProtoConfig.auto_padding})."
            " Pad the batch, or make it with auto_padding=True."
        )
    shards = []
    for start in range(0, dp_size * size, size):
        fillers = min(size, max(0, start + size - rows))
        index: Any = slice(start, start + size) if fillers == 0 else np.arange(start, start + size) % rows
        shards.append((data._take(index), fillers))
    return shards


def _places(group: Group, mesh_name: str) -> list[MeshPlace]:
    places = group.mesh_places(mesh_name)
    collecting = sorted(place.dp_rank for place in places if place.collect)
    if collecting != list(range(len(collecting))) or {place.dp_rank for place in places} != set(collecting):
        raise ValueError(
            f"mesh {mesh_name!r}: every data-parallel position needs exactly one rank that answers for it; the ranks"
            f" say {[(place.dp_rank, place.collect) for place in places]}."
        )
    return places


def _join(outputs: list[Any]) -> Any:
    if all(output is None for output in outputs):
        return None
    if not all(isinstance(output, DataProto) for output in outputs):
        kinds = sorted({type(output).__name__ for output in outputs})
        raise TypeError(
            f"a method whose results are joined must return a DataProto on every rank; it returned {kinds}."
        )
    return DataProto.concat(outputs)
