"""Read folders of torch.distributed.checkpoint without executing anything in them.

torch's own reader unpickles `.metadata` and the objects in data files. This module reads the pickle as plain data,
checks every field, builds torch's metadata from it, and reads only tensors, from files inside the folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner

from verl.utils.safe_pickle import Record, load_records, read_regular
from verl.utils.torch_archive import dimensions, plain_types, read_tensor

METADATA = ".metadata"
# Packages of the classes in .metadata files of torch and Megatron-Core; they are not imported.
_PACKAGES = ("torch", "megatron", "pathlib", "collections", "enum")


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a tensor, saved by `torch.save` at a position in a file."""

    path: Path
    start: int
    length: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Return the tensor with the dtype in the file. ValueError if its shape differs from the metadata."""
        tensor = read_tensor(self.path, self.start, self.length)
        # Megatron-Core saves a tensor of a stack without the stack dimension.
        if tensor.shape != self.shape and (tensor.numel() != math.prod(self.shape) or not tensor.is_contiguous()):
            raise ValueError(
                f"{self.path}: the tensor at byte {self.start} has shape {list(tensor.shape)}, but "
                f"{list(self.shape)} in {METADATA}. Copy the checkpoint again."
            )
        return tensor.view(self.shape)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


def read_folder(folder: Path) -> dict[str, StoredTensor | None]:
    """Return the tensors of a checkpoint by name; None for objects that are not tensors.

    ValueError, with file and cause, if `.metadata` is damaged, refers to files outside the folder, or storage two
    tensors on the same bytes.
    """
    path = folder / METADATA
    try:
        root = load_records(read_regular(path), plain_types(), packages=_PACKAGES)
        fields = _fields(root, "Metadata")
        storage = {_index(key): _fields(info, "_StorageInfo") for key, info in _items(fields, "storage_data")}
        entries = dict(_items(fields, "state_dict_metadata"))
        tensors = {_text(name): _tensor(folder, name, entry, storage) for name, entry in entries.items()}
        _check_storage(chunk for tensor in tensors.values() if tensor is not None for chunk in tensor.chunks)
    except ValueError as error:
        raise ValueError(f"{path}: {error}. Copy the checkpoint again from a trusted source.") from error
    return tensors


class TensorsOnlyReader(dcp.FileSystemReader):
    """torch's reader with `read_folder` in place of pickle and `StoredChunk.read` in place of `torch.load`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._failure: ValueError | OSError | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            tensors = read_folder(self._folder)
        except (ValueError, OSError) as error:
            # Some versions of torch drop errors of this method; `set_up_storage_reader`, called next, raises it.
            self._failure, tensors = error, {}
        chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, tensor in tensors.items()
            for chunk in (tensor.chunks if tensor is not None else ())
        }
        entries = {name: _torch_entry(tensor) for name, tensor in tensors.items()}
        return Metadata(entries, storage_data=chunks, storage_meta=StorageMeta(load_id=self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                _reject_object(item.storage_index.fqn)
            tensor = self.storage_data[item.storage_index].read()
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != tensor.shape:
                raise ValueError(
                    f"{item.storage_index.fqn}: shape {list(tensor.shape)} stored, {list(target.shape)} in the model"
                )
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


class TensorsOnlyPlanner(DefaultLoadPlanner):
    """torch's planner, without unpickling objects."""

    def load_bytes(self, read_item: Any, value: Any) -> NoReturn:
        _reject_object(read_item.dest_index.fqn)


def _reject_object(name: str) -> NoReturn:
    raise ValueError(f"{name} is a pickled object in the checkpoint, not a tensor; it is not loaded.")


def _torch_entry(tensor: StoredTensor | None) -> TensorStorageMetadata | BytesStorageMetadata:
    if tensor is None:
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


def _tensor(folder: Path, name: str, entry: Any, storage: dict[Any, Any]) -> StoredTensor | None:
    if isinstance(entry, Record) and entry.kind.endswith(".BytesStorageMetadata"):
        return None
    fields = _fields(entry, "TensorStorageMetadata")
    properties, shape = fields.get("properties"), dimensions(fields.get("size"))
    state = properties.state if isinstance(properties, Record) and isinstance(properties.state, tuple) else (None,)
    dtype = state[0] or (properties.fields.get("dtype") if isinstance(properties, Record) else None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name[:80]} has no dtype")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise ValueError(f"{name[:80]} has no list of chunks")
    return StoredTensor(shape, dtype, tuple(_chunk(folder, name, chunk, storage, shape, dtype) for chunk in chunks))


def _chunk(
    folder: Path, name: str, entry: Any, storage: dict[Any, Any], full_shape: tuple[int, ...], dtype: torch.dtype
) -> StoredChunk:
    fields = _fields(entry, "ChunkStorageMetadata")
    offsets, shape = dimensions(fields.get("offsets")), dimensions(fields.get("sizes"))
    if not len(offsets) == len(shape) == len(full_shape):
        raise ValueError(f"a chunk of {name[:80]} has a different number of dimensions than the tensor")
    if any(offset + size > total for offset, size, total in zip(offsets, shape, full_shape, strict=True)):
        raise ValueError(f"a chunk of {name[:80]} is outside of it")
    place = storage.get((name, offsets))
    if place is None:
        raise ValueError(f"no file for a chunk of {name[:80]}")
    if place.get("transform_descriptors"):
        raise ValueError(f"{name[:80]} is compressed, which is not supported")
    start, length = dimensions((place.get("offset"), place.get("length")))
    if math.prod(shape) * dtype.itemsize > length:
        raise ValueError(f"a chunk of {name[:80]} has shape {list(shape)} but only {length} bytes")
    return StoredChunk(_inside(folder, place.get("relative_path")), start, length, offsets, shape)


def _inside(folder: Path, relative: Any) -> Path:
    path = PurePosixPath(_text(relative))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in relative:
        raise ValueError(f"reference to a file outside the folder ({relative[:80]!r})")
    return folder / path


def _check_storage(chunks: Iterable[StoredChunk]) -> None:
    """Raise ValueError for tensors that overlap, or end after the end of their file."""
    path, end, size = None, 0, 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.path, chunk.start)):
        if chunk.path != path:
            path, end = chunk.path, 0
            size = path.stat().st_size if path.is_file() else 0
        if chunk.start < end:
            raise ValueError(f"two tensors share byte {chunk.start} of {chunk.path.name}")
        end = chunk.start + chunk.length
        if end > size:
            raise ValueError(f"a tensor ends at byte {end} of {chunk.path.name}, which has {size} bytes")


def _fields(record: Any, kind: str) -> Any:
    if not (isinstance(record, Record) and record.kind.endswith(kind)):
        raise ValueError(f"a {kind} is missing")
    return record.fields


def _items(fields: Any, name: str) -> Iterator[tuple[Any, Any]]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is missing")
    return iter(value.items())


def _index(key: Any) -> tuple[str, tuple[int, ...]]:
    fields = _fields(key, "MetadataIndex")
    return _text(fields.get("fqn")), dimensions(fields.get("offset") or ())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name is not text")
    return value
