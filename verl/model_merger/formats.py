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
from verl.models.megatron_core import CoreArchitecture, Piece, shard_slices, weight_map
from verl.utils.safe_pickle import Record
from verl.workers.engine.common.sharded_checkpoint import METADATA, StoredChunk, read_folder

__all__ = ["METADATA", "core_folder", "core_tensors", "dcp_tensors", "rank_files", "shard_tensors"]


def dcp_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a torch.distributed.checkpoint folder (verl's or Megatron-Core's), no other objects."""
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
    """A LazyTensor that `torch.save` wrote at a position in a file."""

    chunk: StoredChunk
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.chunk.shape

    def read(self, box: Box, target: torch.Tensor) -> None:
        tensor = read_torch_file(self.chunk.path, self.chunk.start, self.chunk.length)
        if isinstance(tensor, FileTensor) and math.prod(tensor.shape) == math.prod(self.shape):
            # Megatron-Core stores one layer of a stack without the dimension of the stack.
            tensor = replace(tensor, shape=self.shape)
        if getattr(tensor, "shape", None) != self.shape:
            raise ValueError(
                f"{self.chunk.path}: damaged: the tensor at byte {self.chunk.start} differs from {METADATA}."
            )
        tensor.read(box, target)


_RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
# Parts of tensor names that wrappers add.
_WRAPPERS = re.compile(r"^module\.|(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the files of FSDP checkpoints, `model_world_size_W_rank_R.pt`, by rank.

    Empty if there are none. ValueError if one is missing, if there are files of several world sizes (fsdp_config.json
    selects one of them), or if there are none of the world size in fsdp_config.json.
    """
    matches = {
        path: match
        for path in sorted(folder.glob("model_world_size_*.pt"))
        if (match := _RANK_FILE.fullmatch(path.name))
    }
    sizes = {int(match[1]) for match in matches.values()}
    if not sizes:
        return {}
    listed = ", ".join(map(str, sorted(sizes)))
    config = folder / "fsdp_config.json"
    if config.is_file():
        world_size = json.loads(config.read_text(encoding="utf-8")).get("world_size")
        if world_size not in sizes:
            raise ValueError(
                f"{config}: world_size is {world_size}, but the files model_world_size_*.pt have world size {listed}."
                " Use the fsdp_config.json of this checkpoint, or delete it."
            )
        sizes = {world_size}
    if len(sizes) > 1:
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
        for stored_name, value in state.items():
            for shape, piece in _pieces(f"{path}: {stored_name}", value, rank):
                name = _WRAPPERS.sub("", str(stored_name))
                if shapes.setdefault(name, shape) != shape:
                    raise ValueError(
                        f"{path}: {name} has shape {list(shape)}, but {list(shapes[name])} in the file of another rank."
                    )
                dtypes.setdefault(name, piece.tensor.dtype)
                is_empty_shard = math.prod(piece.shape) == 0 and math.prod(shape) > 0
                if not is_empty_shard:
                    pieces.setdefault(name, {}).setdefault(piece.at, piece)  # replicas are equal: keep the first
    folder = next(iter(files.values())).parent
    return {
        name: assemble(f"{folder}: {name}", shape, dtypes[name], list(pieces.get(name, {}).values()))
        for name, shape in shapes.items()
    }


def _pieces(where: str, value: Any, rank: int) -> Iterator[tuple[tuple[int, ...], TensorPiece]]:
    """Yield (shape of the full tensor, piece) for each piece in `value`, an entry of the rank's file.

    Objects other than tensors have none. `where`: file and name, for errors.
    """
    if isinstance(value, Record) and value.kind.endswith(".DTensor"):
        yield _dtensor_piece(where, value, rank)
    elif isinstance(value, Record) and value.kind.endswith(".ShardedTensor"):
        shards, metadata, *_ = value.state
        for shard in shards:
            offsets = shard.fields["metadata"].fields["shard_offsets"]
            yield _full_piece(metadata.fields["size"], offsets, shard.fields["tensor"])
    elif hasattr(value, "read"):
        yield _full_piece(value.shape, [0] * len(value.shape), value)
    elif isinstance(value, Record) and "Tensor" in value.kind:
        raise ValueError(
            f"{where} is a {value.kind}, which is not supported (only DTensor, ShardedTensor, plain tensors)."
        )


def _full_piece(shape: Sequence[int], at: Sequence[int], tensor: LazyTensor) -> tuple[tuple[int, ...], TensorPiece]:
    """Return (shape, piece at the offsets `at` of a tensor of this shape); the piece is all of `tensor`."""
    return tuple(shape), TensorPiece(tuple(at), tensor.shape, tensor, tuple(0 for _ in at))


def _dtensor_piece(where: str, value: Record, rank: int) -> tuple[tuple[int, ...], TensorPiece]:
    """Return (shape of the full tensor, the rank's shard of it) of a DTensor.

    The offsets of the shard follow from the placements and the rank's coordinate in the mesh.
    """
    spec, local = value.fields["_spec"].fields, value.fields["_local_tensor"]
    _, shape, *_ = value.args
    mesh = spec["mesh"].fields
    mesh_shape = _mesh_shape(mesh)
    mesh_strides = [math.prod(mesh_shape[dim + 1 :]) for dim in range(len(mesh_shape))]
    row_major_coordinate = [rank // stride % size for size, stride in zip(mesh_shape, mesh_strides, strict=True)]
    coordinate = mesh.get("_coordinate_on_dim") or row_major_coordinate
    begin, end = [0] * len(shape), list(shape)
    for dim, num_shards, shard_index in _splits(where, spec["placements"], mesh_shape, coordinate):
        length = math.ceil((end[dim] - begin[dim]) / num_shards)
        shard_begin = begin[dim] + shard_index * length
        begin[dim], end[dim] = min(end[dim], shard_begin), min(end[dim], shard_begin + length)
    expected = tuple(stop - start for start, stop in zip(begin, end, strict=True))
    if math.prod(local.shape) and local.shape != expected:
        raise ValueError(
            f"{where}: the shard has shape {list(local.shape)}; its placements imply {list(expected)}. The file is"
            " damaged, or its name has the wrong rank."
        )
    return _full_piece(shape, begin, local)


def _splits(
    where: str, placements: Sequence[Record], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor dimension, number of shards, index of the shard), in the order in which the tensor was split."""
    strided = []
    for placement, num_shards, shard_index in zip(placements, mesh_shape, coordinate, strict=True):
        kind = placement.kind.rpartition(".")[2]
        if kind == "_StridedShard":
            # It splits the shards that the later mesh dimensions have created, so it is applied after them.
            strided.append((_dim(placement), num_shards, shard_index))
        elif kind == "Shard":
            yield _dim(placement), num_shards, shard_index
        elif kind != "Replicate":
            raise ValueError(f"{where}: placement {kind} is not supported (only Replicate and Shard).")
    yield from reversed(strided)


def _dim(placement: Record) -> int:
    """Return the tensor dimension of a placement, stored by name or by position depending on the version of torch."""
    state = placement.state if isinstance(placement.state, tuple) else ()
    return placement.fields["dim"] if "dim" in placement.fields else (*placement.args, *state)[0]


def _mesh_shape(mesh: Mapping[str, Any]) -> list[int]:
    """Return the shape of a DeviceMesh, stored as a tensor of ranks or as a layout, depending on torch's version."""
    if "mesh" in mesh:
        return list(mesh["mesh"].shape)
    layout = mesh["_layout"].fields
    axes = [axis.fields["shape"] for axis in layout["axes"]] if "axes" in layout else layout["shape"]
    return [_product(axis) for axis in (axes if isinstance(axes, tuple | list) else (axes,))]


def _product(lengths: Any) -> int:
    """Return the product of the numbers in nested tuples or lists."""
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

    Megatron-Core is not needed: its checkpoints are torch.distributed.checkpoint files, independent of the parallel
    layout.
    """
    stored = _without_prefix(folder, dcp_tensors(folder))
    arch = CoreArchitecture.from_config(hf_config)
    pieces: dict[str, list[TensorPiece]] = {}
    for weight in weight_map(arch, kind):
        if weight.copy_of is not None:
            continue
        tensor = _find_weight(stored, weight.name)
        if tensor is None:
            if weight.name == "score.bias":  # other frameworks have no bias
                continue
            raise ValueError(f"{folder}: {weight.name} is missing. The checkpoint does not match config.json.")
        for part in shard_slices(weight, arch, rank=0, size=1, stored=True):
            piece = _to_piece(part, tensor)
            ends = [begin + length for begin, length in zip(piece.start, piece.shape, strict=True)]
            if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
                raise ValueError(
                    f"{folder}: {weight.name} has shape {list(tensor.shape)}; config.json implies {list(weight.shape)}."
                    " Use the config.json of this model."
                )
            pieces.setdefault(part.hf, []).append(piece)
    return {name: _assemble_pieces(folder, name, parts) for name, parts in pieces.items()}


def _to_piece(part: Piece, tensor: LazyTensor) -> TensorPiece:
    """Return the piece of a Hugging Face tensor that `part` describes; it is stored in Core's `tensor`."""
    ranges = [range(at, at + 1) if isinstance(at, int) else range(at.start, at.stop) for at in part.source]
    offset_in_shard = tuple(indices.start for indices in part.place)
    at, shape = tuple(indices.start for indices in ranges), tuple(map(len, ranges))
    return TensorPiece(at, shape, tensor, offset_in_shard)


def _assemble_pieces(folder: Path, name: str, pieces: list[TensorPiece]) -> LazyTensor:
    """Return the tensor of these pieces; its shape is that of the smallest box which contains them."""
    ends = [tuple(at + length for at, length in zip(piece.at, piece.shape, strict=True)) for piece in pieces]
    shape = tuple(max(dim) for dim in zip(*ends, strict=True))
    return assemble(f"{folder}: {name}", shape, pieces[0].tensor.dtype, pieces)


def _without_prefix(folder: Path, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Remove a common prefix (`model.`, `module.`) of all names, and tensors without it (an optimizer's)."""
    prefixes = [name.removesuffix(_EMBEDDING) for name in tensors if name.endswith(_EMBEDDING)]
    if not prefixes:
        raise ValueError(f"{folder}: {_EMBEDDING} is missing: not the weights of a Megatron-Core model.")
    prefix = min(prefixes, key=len)
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _find_weight(stored: Mapping[str, LazyTensor], name: str) -> LazyTensor | None:
    """Return Core's weight `name` under any of its possible names; layers and experts may be stacked."""
    for key, index in _stored_names(name):
        if key in stored:
            return IndexedTensor(stored[key], index) if index else stored[key]
    return None


def _stored_names(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names under which checkpoints may store Core's weight `name`, each with the index in its stack.

    The index is (layer, expert) for layers and experts that are stacked along the first dimensions of one tensor, and
    () for a tensor of its own. Norms may be stored with the linear layer into which they are fused.
    """
    layer_match = re.fullmatch(r"(decoder\.layers\.)(\d+)\.(.+)", name)
    if layer_match is None:
        yield name, ()
        if name.startswith("score."):
            yield name.replace("score.", "output_layer."), ()
        return
    layers, layer, parameter = layer_match.groups()
    fused = [parameter.replace(norm, linear) for norm, linear in _FUSED.items() if parameter.startswith(norm)]
    for suffix in (parameter, *fused):
        expert_match = re.fullmatch(r"(.+\.experts\.)local_experts\.(\d+)\.(.+)", suffix)
        stacked, separate = (layers, (int(layer),)), (f"{layers}{layer}.", ())
        for prefix, index in (stacked, separate):
            if expert_match is None:
                yield prefix + suffix, index
            else:
                experts, expert, linear = expert_match.groups()
                yield f"{prefix}{experts}experts.{linear}", (*index, int(expert))
                yield f"{prefix}{experts}experts.{expert}.{linear}", index
