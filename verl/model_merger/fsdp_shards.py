"""FSDP checkpoints of one file for each rank (`model_world_size_W_rank_R.pt`), as tensors that can be read.

A file holds this rank's part of every tensor: a DTensor (FSDP2), a ShardedTensor (FSDP1), or a whole tensor where
nothing is sharded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.model_merger.stored import Piece, Stored, assembled
from verl.model_merger.torch_files import read_torch_file
from verl.utils.safe_pickle import Record

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
# What wrappers put into the names of a model's tensors.
_WRAPPERS = re.compile(r"^module\.|(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def rank_files(folder: Path) -> dict[int, Path]:
    """By rank; ValueError where one is missing, or those of several world sizes lie side by side."""
    found = {
        path: match for path in sorted(folder.glob("model_world_size_*.pt")) if (match := _FILE.fullmatch(path.name))
    }
    sizes = {int(match[1]) for match in found.values()}
    if not sizes:
        return {}
    config = folder / "fsdp_config.json"
    if config.is_file():
        said = json.loads(config.read_text(encoding="utf-8")).get("world_size")
        sizes = {said} if said in sizes else sizes | {said}
    if len(sizes) > 1:
        listed = ", ".join(map(str, sorted(sizes, key=str)))
        raise ValueError(f"{folder}: files of several world sizes ({listed}). Keep those of one checkpoint.")
    (size,) = sizes
    files = {int(match[2]): path for path, match in found.items() if int(match[1]) == size}
    missing = [f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size) if rank not in files]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(f"{folder}: {', '.join(missing[:4])}{more} missing. Copy the files of all ranks into it.")
    return files


def shard_tensors(files: Mapping[int, Path]) -> dict[str, Stored]:
    """By name, as in the model: what wrappers added to the names is taken away."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, Any] = {}
    pieces: dict[str, dict[tuple[int, ...], Piece]] = {}
    for rank, path in files.items():
        state = read_torch_file(path)
        if not isinstance(state, Mapping):
            raise ValueError(f"{path}: holds no weights by name.")
        for stored, value in state.items():
            for shape, piece in _parts(f"{path}: {stored}", value, rank):
                name = _WRAPPERS.sub("", str(stored))
                if shapes.setdefault(name, shape) != shape:
                    raise ValueError(f"{path}: {name} is {list(shape)}, and {list(shapes[name])} in another file.")
                dtypes.setdefault(name, piece.tensor.dtype)
                if math.prod(piece.shape) or not math.prod(shape):
                    pieces.setdefault(name, {}).setdefault(piece.at, piece)  # copies of it are the same
    folder = next(iter(files.values())).parent
    return {
        name: assembled(f"{folder}: {name}", shape, dtypes[name], list(pieces.get(name, {}).values()))
        for name, shape in shapes.items()
    }


def _parts(where: str, value: Any, rank: int) -> Iterator[tuple[tuple[int, ...], Piece]]:
    """(shape of the whole, part of it) for each part that a file has; nothing for what is no tensor."""
    if isinstance(value, Record) and value.kind.endswith(".DTensor"):
        yield _of_dtensor(where, value, rank)
    elif isinstance(value, Record) and value.kind.endswith(".ShardedTensor"):
        shards, metadata, *_ = value.state
        for shard in shards:
            about = shard.fields["metadata"].fields
            yield _piece(metadata.fields["size"], about["shard_offsets"], shard.fields["tensor"])
    elif hasattr(value, "read"):
        yield _piece(value.shape, [0] * len(value.shape), value)
    elif isinstance(value, Record) and "Tensor" in value.kind:
        raise ValueError(f"{where} is a {value.kind}. DTensor, ShardedTensor and plain tensors are known.")


def _piece(shape: Sequence[int], at: Sequence[int], tensor: Stored) -> tuple[tuple[int, ...], Piece]:
    return tuple(shape), Piece(tuple(at), tensor.shape, tensor, tuple(0 for _ in at))


def _of_dtensor(where: str, value: Record, rank: int) -> tuple[tuple[int, ...], Piece]:
    spec, local = value.fields["_spec"].fields, value.fields["_local_tensor"]
    _, shape, *_ = value.args
    mesh = spec["mesh"].fields
    sizes = _mesh_shape(mesh)
    steps = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    by_rank = [rank // step % size for size, step in zip(sizes, steps, strict=True)]
    coordinate = mesh.get("_coordinate_on_dim") or by_rank
    begin, end = [0] * len(shape), list(shape)
    for dim, size, at in _splits(where, spec["placements"], sizes, coordinate):
        each = math.ceil((end[dim] - begin[dim]) / size)
        begin[dim], end[dim] = min(end[dim], begin[dim] + at * each), min(end[dim], begin[dim] + (at + 1) * each)
    expected = tuple(stop - start for start, stop in zip(begin, end, strict=True))
    if math.prod(local.shape) and local.shape != expected:
        raise ValueError(f"{where}: its part is {list(local.shape)}, by its placements {list(expected)}.")
    return _piece(shape, begin, local)


def _splits(
    where: str, placements: Sequence[Record], sizes: Sequence[int], coordinate: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """(dimension, into how many, which of them), in the order in which the tensor was divided."""
    strided = []
    for placement, size, at in zip(placements, sizes, coordinate, strict=True):
        kind = placement.kind.rpartition(".")[2]
        if kind == "_StridedShard":
            strided.append((_dim(placement), size, at))  # what other axes of the mesh divided already
        elif kind == "Shard":
            yield _dim(placement), size, at
        elif kind != "Replicate":
            raise ValueError(f"{where}: placed as {kind}. Replicate and Shard are known.")
    yield from reversed(strided)


def _dim(placement: Record) -> int:
    """Given by name or by position: versions of torch differ."""
    state = placement.state if isinstance(placement.state, tuple) else ()
    return placement.fields["dim"] if "dim" in placement.fields else (*placement.args, *state)[0]


def _mesh_shape(mesh: Mapping[str, Any]) -> list[int]:
    """Of a DeviceMesh as the versions of torch store it: the table of ranks, or how it is laid out."""
    if "mesh" in mesh:
        return list(mesh["mesh"].shape)
    layout = mesh["_layout"].fields
    axes = [axis.fields["shape"] for axis in layout["axes"]] if "axes" in layout else layout["shape"]
    return [_product(axis) for axis in (axes if isinstance(axes, tuple | list) else (axes,))]


def _product(lengths: Any) -> int:
    return math.prod(map(_product, lengths)) if isinstance(lengths, tuple | list) else int(lengths)
