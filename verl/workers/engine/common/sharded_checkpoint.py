"""Folders of torch.distributed.checkpoint: sharded tensors, written and read on any number of ranks.

Reading executes nothing in a folder. torch's own reader unpickles `.metadata` and the objects in data files. This
module reads the pickle as plain data, checks every field, builds torch's metadata from it, and reads only tensors, from
files inside the folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from verl.types.weights import TensorSpec
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.utils.safe_pickle import Record, load_records, read_regular
from verl.utils.torch_archive import dimensions, plain_types, read_tensor

METADATA = ".metadata"
# Packages of the classes in .metadata files of torch and Megatron-Core; they are not imported.
_PACKAGES = ("torch", "megatron", "pathlib", "collections", "enum")
THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
# Smaller states are written to one file.
ONE_FILE_BYTES = 2**28

# ---------------------------------------------------------------- reading without unpickling


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor (a range of indices per dimension), saved by `torch.save` at a position in a file."""

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

    ValueError, with file and cause, if `.metadata` is damaged, refers to files outside the folder or to bytes after the
    end of a file, or places two tensors on the same bytes.
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
    state = properties.state if isinstance(properties, Record) and isinstance(properties.state, tuple) else ()
    dtype = (state[0] if state else None) or (
        properties.fields.get("dtype") if isinstance(properties, Record) else None
    )
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
        raise ValueError(f"a chunk of {name[:80]} exceeds the tensor's shape {list(full_shape)}")
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


# ---------------------------------------------------------------- sharded tensors


def save_tensors(
    tensors: Mapping[str, torch.Tensor], folder: Path, recorder: ChecksumRecorder, group: dist.ProcessGroup | None
) -> None:
    """Write this rank's shards, with checksums by its `recorder`. A collective of `group`.

    Device tensors are copied to host memory one at a time.
    """
    writer = _writer_for(tensors.values(), folder, recorder)
    with _plain_errors(recorder):
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def load_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Load into the given tensors in place, whatever their sharding. A collective. All of them must be stored."""
    with _plain_errors():
        reader, planner = TensorsOnlyReader(folder), TensorsOnlyPlanner()
        dcp.load(dict(tensors), storage_reader=reader, planner=planner)


def _writer_for(tensors: Iterable[torch.Tensor], folder: Path, recorder: ChecksumRecorder) -> dcp.FileSystemWriter:
    """Return a writer; tensors in host memory are written by several threads."""
    on_host = all(value.device.type == "cpu" for value in tensors)
    return ShardWriter(folder, recorder, max_files=THREADS if on_host else 1)


@contextmanager
def _plain_errors(recorder: ChecksumRecorder | None = None) -> Iterator[None]:
    """Raise only one rank's error: torch's CheckpointException is a BaseException with the tracebacks of all ranks."""
    try:
        yield
    except CheckpointException as error:
        if recorder is not None and recorder.failure is not None:
            raise recorder.failure from error
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"rank {rank}: {cause}") from cause


def stored_tensors(folder: Path) -> dict[str, TensorSpec]:
    """Return shape and dtype of the tensors in a checkpoint folder, without reading them."""
    if not (folder / METADATA).is_file():
        raise ValueError(f"{folder}: is not a checkpoint ({METADATA} is missing). Choose a completely saved step.")
    stored = read_folder(folder)
    return {name: TensorSpec(entry.shape, entry.dtype) for name, entry in stored.items() if entry is not None}


class ShardWriter(dcp.FileSystemWriter):
    """Writes through a recorder; large states as several files in parallel, because checksums take as long as
    writing to disk."""

    def __init__(self, folder: Path, recorder: ChecksumRecorder, max_files: int) -> None:
        # `per_thread_copy_ahead` would copy to page-locked memory, rounded up to powers of two and never freed. The
        # recorder's streams sync files to disk when they are closed.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _RecordedFileSystem(recorder)
        self._max_files = max_files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        parts = [
            replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=plan.storage_data.prefix + name))
            for name, items in zip(["", "1_", "2_", "3_"], self._split(plan.items), strict=False)
        ]
        # Not torch's own threads (`thread_count`): their errors are lost, and files would be missing without an error.
        with ThreadPoolExecutor(len(parts), "checkpoint") as threads:
            written = list(threads.map(lambda part: super(ShardWriter, self).write_data(part, planner).value(), parts))
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([result for results in written for result in results])
        return done

    def _split(self, items: list[WriteItem]) -> list[list[WriteItem]]:
        """Split the items into lists of about equal size in bytes, one per file."""
        sizes = [0] * min(self._max_files, 1 + sum(map(_size_of, items)) // ONE_FILE_BYTES)
        if len(sizes) == 1:
            return [items]
        parts: list[list[WriteItem]] = [[] for _ in sizes]
        for item in sorted(items, key=_size_of, reverse=True):
            least = sizes.index(min(sizes))
            parts[least].append(item)
            sizes[least] += _size_of(item)
        return parts


def _size_of(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


class _RecordedFileSystem(FileSystem):
    """A file system for torch that writes through a recorder."""

    def __init__(self, recorder: ChecksumRecorder) -> None:
        self._recorder = recorder

    def create_stream(self, path: str | os.PathLike, mode: str) -> Any:
        return self._recorder.open(path) if mode == "wb" else super().create_stream(path, mode)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self._recorder.renamed(path, new_path)


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk of the stored tensor `name`: `tensor`, which may be a view, at `offsets`.

    For engines that do not split tensors into the even shards of DTensors. Files contain only chunks and their
    offsets, so that engines with other layouts can read them.
    """

    name: str
    shape: tuple[int, ...]
    """Of the full tensor."""
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.name, self.offsets


def save_chunks(
    chunks: Iterable[Chunk], folder: Path, recorder: ChecksumRecorder, group: dist.ProcessGroup | None
) -> None:
    """Write this rank's chunks. The chunks of all ranks must cover every element once. A collective of `group`."""
    chunks = list(chunks)
    with _plain_errors(recorder):
        writer = _writer_for([chunk.tensor for chunk in chunks], folder, recorder)
        dcp.save({}, storage_writer=writer, planner=_SavePlanner(chunks), process_group=group)


def load_chunks(chunks: Iterable[Chunk], folder: Path) -> None:
    """Load into the chunks' tensors in place. A collective. ValueError for missing tensors and other shapes."""
    with _plain_errors():
        dcp.load({}, storage_reader=TensorsOnlyReader(folder), planner=_LoadPlanner(list(chunks)))


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = {chunk.key: chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(chunk) for chunk in self._chunks.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks[index.fqn, tuple(index.offset or ())].tensor.detach()


class _LoadPlanner(TensorsOnlyPlanner):
    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = {chunk.key: chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        by_name: dict[str, list[Chunk]] = {}
        for chunk in self._chunks.values():
            by_name.setdefault(chunk.name, []).append(chunk)
        items: list[Any] = []
        for name, chunks in by_name.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != chunks[0].shape:
                shape = list(stored.size) if isinstance(stored, TensorStorageMetadata) else "missing"
                raise ValueError(f"{name}: shape {list(chunks[0].shape)} in the model, {shape} in the checkpoint.")
            items += create_read_items_for_chunk_list(name, stored, [_metadata(chunk) for chunk in chunks])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks[index.fqn, tuple(index.offset or ())].tensor.detach()


def _write_item(chunk: Chunk) -> WriteItem:
    properties = TensorProperties(dtype=chunk.tensor.dtype)
    data = TensorWriteData(chunk=_metadata(chunk), properties=properties, size=torch.Size(chunk.shape))
    return WriteItem(MetadataIndex(chunk.name, torch.Size(chunk.offsets)), WriteItemType.SHARD, tensor_data=data)


def _metadata(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.tensor.shape)
