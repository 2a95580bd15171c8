"""Checkpoint formats as lazily read tensors: torch.distributed.checkpoint, FSDP rank files, Megatron-Core."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from verl.model_merger.lazy_tensors import (
    Box,
    FileTensor,
    IndexedTensor,
    LazyTensor,
    TensorPiece,
    assemble,
    read_torch_file,
)
from verl.models.loading import ModelKind
from verl.models.megatron_core import CoreArchitecture, shard_slices, weight_map
from verl.utils.safe_pickle import Record
from verl.workers.engine.common.dcp_reader import METADATA, StoredChunk, read_folder

__all__ = ["METADATA", "dcp_tensors"]


def dcp_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a torch.distributed.checkpoint folder (ours, Megatron-Core's), without other objects."""
    tensors: dict[str, LazyTensor] = {}
    for name, stored in read_folder(folder).items():
        if stored is not None:
            pieces = [
                TensorPiece(chunk.offsets, chunk.shape, _SavedChunk(chunk, stored.dtype), (0,) * len(chunk.shape))
                for chunk in stored.chunks
            ]
            tensors[name] = assemble(f"{folder}: {name}", stored.shape, stored.dtype, pieces)
    return tensors


@dataclass(frozen=True)
class _SavedChunk:
    """A tensor written by `torch.save` at a position in a file."""

    chunk: StoredChunk
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.chunk.shape

    def read(self, box: Box, target: torch.Tensor) -> None:
        tensor = read_torch_file(self.chunk.path, self.chunk.start, self.chunk.length)
        if isinstance(tensor, FileTensor) and math.prod(tensor.shape) == math.prod(self.shape):
            tensor = replace(tensor, shape=self.shape)  # Core stores a tensor of a stack without the stack dimension
        if getattr(tensor, "shape", None) != self.shape:
            raise ValueError(
                f"{self.chunk.path}: damaged: the tensor at byte {self.chunk.start} differs from {METADATA}."
            )
        tensor.read(box, target)


_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
# Parts of tensor names that wrappers add.
_WRAPPERS = re.compile(r"^module\.|(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the files of FSDP checkpoints, `model_world_size_W_rank_R.pt`, by rank.

    ValueError if one is missing, or if there are files of several world sizes.
    """
    matches = {
        path: match for path in sorted(folder.glob("model_world_size_*.pt")) if (match := _FILE.fullmatch(path.name))
    }
    sizes = {int(match[1]) for match in matches.values()}
    if not sizes:
        return {}
    config = folder / "fsdp_config.json"
    if config.is_file():
        world_size = json.loads(config.read_text(encoding="utf-8")).get("world_size")
        sizes = {world_size} if world_size in sizes else sizes | {world_size}
    if len(sizes) > 1:
        listed = ", ".join(map(str, sorted(sizes, key=str)))
        raise ValueError(f"{folder}: files of several world sizes ({listed}). Keep those of one checkpoint.")
    (size,) = sizes
    files = {int(match[2]): path for path, match in matches.items() if int(match[1]) == size}
    missing = [f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size) if rank not in files]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(f"{folder}: {', '.join(missing[:4])}{more} missing. Copy the files of all ranks into it.")
    return files


def shard_tensors(files: Mapping[int, Path]) -> dict[str, LazyTensor]:
    """Return the tensors of FSDP rank files by their names in the model, without parts that wrappers add.

    A file contains the rank's part of every tensor: a DTensor (FSDP2), a ShardedTensor (FSDP1), or a plain tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, Any] = {}
    pieces: dict[str, dict[tuple[int, ...], TensorPiece]] = {}
    for rank, path in files.items():
        state = read_torch_file(path)
        if not isinstance(state, Mapping):
            raise ValueError(f"{path}: not a state dict.")
        for stored, value in state.items():
            for shape, piece in _parts(f"{path}: {stored}", value, rank):
                name = _WRAPPERS.sub("", str(stored))
                if shapes.setdefault(name, shape) != shape:
                    raise ValueError(f"{path}: {name} is {list(shape)}, and {list(shapes[name])} in another file.")
                dtypes.setdefault(name, piece.tensor.dtype)
                if math.prod(piece.shape) or not math.prod(shape):
                    pieces.setdefault(name, {}).setdefault(piece.at, piece)  # replicas are equal
    folder = next(iter(files.values())).parent
    return {
        name: assemble(f"{folder}: {name}", shape, dtypes[name], list(pieces.get(name, {}).values()))
        for name, shape in shapes.items()
    }


def _parts(where: str, value: Any, rank: int) -> Iterator[tuple[tuple[int, ...], TensorPiece]]:
    """Yield (full shape, piece) for each part in a file; nothing for objects other than tensors."""
    if isinstance(value, Record) and value.kind.endswith(".DTensor"):
        yield _dtensor_piece(where, value, rank)
    elif isinstance(value, Record) and value.kind.endswith(".ShardedTensor"):
        shards, metadata, *_ = value.state
        for shard in shards:
            offsets = shard.fields["metadata"].fields["shard_offsets"]
            yield _piece(metadata.fields["size"], offsets, shard.fields["tensor"])
    elif hasattr(value, "read"):
        yield _piece(value.shape, [0] * len(value.shape), value)
    elif isinstance(value, Record) and "Tensor" in value.kind:
        raise ValueError(
            f"{where} is a {value.kind}, which is not supported (only DTensor, ShardedTensor, plain tensors)."
        )


def _piece(shape: Sequence[int], at: Sequence[int], tensor: LazyTensor) -> tuple[tuple[int, ...], TensorPiece]:
    return tuple(shape), TensorPiece(tuple(at), tensor.shape, tensor, tuple(0 for _ in at))


def _dtensor_piece(where: str, value: Record, rank: int) -> tuple[tuple[int, ...], TensorPiece]:
    spec, local = value.fields["_spec"].fields, value.fields["_local_tensor"]
    _, shape, *_ = value.args
    mesh = spec["mesh"].fields
    sizes = _mesh_shape(mesh)
    steps = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    by_rank = [rank // step % size for size, step in zip(sizes, steps, strict=True)]
    coordinate = mesh.get("_coordinate_on_dim") or by_rank
    begin, end = [0] * len(shape), list(shape)
    for dim, size, at in _splits(where, spec["placements"], sizes, coordinate):
        length = math.ceil((end[dim] - begin[dim]) / size)
        begin[dim], end[dim] = min(end[dim], begin[dim] + at * length), min(end[dim], begin[dim] + (at + 1) * length)
    expected = tuple(stop - start for start, stop in zip(begin, end, strict=True))
    if math.prod(local.shape) and local.shape != expected:
        raise ValueError(f"{where}: shard of shape {list(local.shape)}, but {list(expected)} by its placements.")
    return _piece(shape, begin, local)


def _splits(
    where: str, placements: Sequence[Record], sizes: Sequence[int], coordinate: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (dimension, number of parts, index of the part), in the order in which the tensor was split."""
    strided = []
    for placement, size, at in zip(placements, sizes, coordinate, strict=True):
        kind = placement.kind.rpartition(".")[2]
        if kind == "_StridedShard":
            strided.append((_dim(placement), size, at))  # already split by other mesh dimensions
        elif kind == "Shard":
            yield _dim(placement), size, at
        elif kind != "Replicate":
            raise ValueError(f"{where}: placement {kind} is not supported (only Replicate and Shard).")
    yield from reversed(strided)


def _dim(placement: Record) -> int:
    """Return the dimension, stored by name or by position depending on the version of torch."""
    state = placement.state if isinstance(placement.state, tuple) else ()
    return placement.fields["dim"] if "dim" in placement.fields else (*placement.args, *state)[0]


def _mesh_shape(mesh: Mapping[str, Any]) -> list[int]:
    """Return the shape of a DeviceMesh, stored as table of ranks or as layout depending on the version of torch."""
    if "mesh" in mesh:
        return list(mesh["mesh"].shape)
    layout = mesh["_layout"].fields
    axes = [axis.fields["shape"] for axis in layout["axes"]] if "axes" in layout else layout["shape"]
    return [_product(axis) for axis in (axes if isinstance(axes, tuple | list) else (axes,))]


def _product(lengths: Any) -> int:
    return math.prod(map(_product, lengths)) if isinstance(lengths, tuple | list) else int(lengths)


_EMBEDDING = "embedding.word_embeddings.weight"
# Names of norms that are fused into the next linear layer.
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def core_folder(folder: Path) -> Path | None:
    """Return the folder of Megatron-Core's files in a checkpoint; None if there are none."""
    candidates = (folder, folder / "dist_ckpt", folder / "model" / "dist_ckpt")
    return next((path for path in candidates if (path / METADATA).is_file() and (path / "common.pt").is_file()), None)


def core_tensors(folder: Path, hf_config: object, kind: ModelKind) -> dict[str, LazyTensor]:
    """Return the tensors of a Megatron-Core checkpoint by Hugging Face name on disk, without vocabulary padding.

    Core need not be installed: its files are those of torch, and their weights are independent of the layout.
    """
    stored = _without_prefix(folder, dcp_tensors(folder))
    arch = CoreArchitecture.from_config(hf_config)
    pieces: dict[str, list[TensorPiece]] = {}
    for weight in weight_map(arch, kind):
        if weight.copy_of is not None:
            continue
        tensor = _find(stored, weight.name)
        if tensor is None:
            if weight.name == "score.bias":  # other frameworks have no bias
                continue
            raise ValueError(
                f"{folder}: {weight.name} is missing. The checkpoint is of another model than config.json."
            )
        for part in shard_slices(weight, arch, 0, 1, stored=True):
            rows = [(at, at + 1) if isinstance(at, int) else (at.start, at.stop) for at in part.source]
            shape = tuple(stop - start for start, stop in rows)
            start = tuple(rows.start for rows in part.place)
            if any(begin + length > size for begin, length, size in zip(start, shape, tensor.shape, strict=True)):
                raise ValueError(
                    f"{folder}: {weight.name} has shape {list(tensor.shape)}, but {list(weight.shape)} by config.json. "
                    "Use the config.json of this model."
                )
            pieces.setdefault(part.hf, []).append(TensorPiece(tuple(begin for begin, _ in rows), shape, tensor, start))
    return {name: _joined(folder, name, parts) for name, parts in pieces.items()}


def _joined(folder: Path, name: str, parts: list[TensorPiece]) -> LazyTensor:
    ends = [tuple(at + length for at, length in zip(part.at, part.shape, strict=True)) for part in parts]
    shape = tuple(max(dim) for dim in zip(*ends, strict=True))
    return assemble(f"{folder}: {name}", shape, parts[0].tensor.dtype, parts)


def _without_prefix(folder: Path, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Remove a common prefix (`model.`, `module.`) of all names, and tensors without it (an optimizer's)."""
    prefixes = [name.removesuffix(_EMBEDDING) for name in tensors if name.endswith(_EMBEDDING)]
    if not prefixes:
        raise ValueError(f"{folder}: {_EMBEDDING} is missing: not the weights of a Megatron-Core model.")
    prefix = min(prefixes, key=len)
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _find(stored: Mapping[str, LazyTensor], name: str) -> LazyTensor | None:
    """Return Core's weight `name` under any of its possible names; layers and experts may be stacked."""
    for key, index in _stored_names(name):
        if key in stored:
            return IndexedTensor(stored[key], index) if index else stored[key]
    return None


def _stored_names(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, index in the stack)."""
    layer = re.fullmatch(r"(decoder\.layers\.)(\d+)\.(.+)", name)
    if layer is None:
        yield name, ()
        if name.startswith("score."):
            yield name.replace("score.", "output_layer."), ()
        return
    for part in (layer[3], *(layer[3].replace(*names) for names in _FUSED.items() if layer[3].startswith(names[0]))):
        expert = re.fullmatch(r"(.+\.experts\.)local_experts\.(\d+)\.(.+)", part)
        for stacked in (True, False):
            head, at = (layer[1], (int(layer[2]),)) if stacked else (f"{layer[1]}{layer[2]}.", ())
            if expert is None:
                yield head + part, at
            else:
                yield f"{head}{expert[1]}experts.{expert[3]}", (*at, int(expert[2]))
                yield f"{head}{expert[1]}experts.{expert[2]}.{expert[3]}", at
