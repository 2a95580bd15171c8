"""Write and read sharded tensors with torch.distributed.checkpoint, on any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
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
from verl.workers.engine.common.dcp_reader import METADATA, TensorsOnlyPlanner, TensorsOnlyReader, read_folder

_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
# Less is one file.
_ONE_FILE = 2**28


def save_tensors(
    tensors: Mapping[str, torch.Tensor], folder: Path, recorder: ChecksumRecorder, group: dist.ProcessGroup | None
) -> None:
    """Every rank writes its shards, their checksums taken by its `recorder`; a collective of `group`.

    What is on a device comes to host memory tensor by tensor.
    """
    writer = writer_for(tensors.values(), folder, recorder)
    with plain_errors(recorder):
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def load_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read into the given tensors (sharded as they are now), in place; a collective. All of them must be there."""
    with plain_errors():
        reader, planner = TensorsOnlyReader(folder), TensorsOnlyPlanner()
        dcp.load(dict(tensors), storage_reader=reader, planner=planner)


def writer_for(tensors: Iterable[torch.Tensor], folder: Path, recorder: ChecksumRecorder) -> dcp.FileSystemWriter:
    """What writes them, through the recorder."""
    here = all(value.device.type == "cpu" for value in tensors)
    return _Writer(folder, recorder, side_by_side=_THREADS if here else 1)


@contextmanager
def plain_errors(recorder: ChecksumRecorder | None = None) -> Iterator[None]:
    """What ranks raised, as one exception: torch's own is no Exception, and its text is all their tracebacks."""
    try:
        yield
    except CheckpointException as error:
        if recorder is not None and recorder.failure is not None:
            raise recorder.failure from error
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"rank {rank}: {cause}") from cause


def stored_tensors(folder: Path) -> dict[str, TensorSpec]:
    """The tensors in a checkpoint folder, without reading them."""
    if not (folder / METADATA).is_file():
        raise ValueError(f"{folder}: no checkpoint here ({METADATA} is missing). Choose a step that was saved whole.")
    stored = read_folder(folder)
    return {name: TensorSpec(entry.shape, entry.dtype) for name, entry in stored.items() if entry is not None}


class _Writer(dcp.FileSystemWriter):
    """Through a recorder, and what is large as several files side by side: checksums take as long as the disk."""

    def __init__(self, folder: Path, recorder: ChecksumRecorder, side_by_side: int) -> None:
        # Copies made ahead would lie in page-locked memory, rounded up to powers of two and never given back. Files are
        # brought to disk by the recorder's streams when they close.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _RecordedFileSystem(recorder)
        self._side_by_side = side_by_side

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        parts = [
            replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=plan.storage_data.prefix + name))
            for name, items in zip(["", "1_", "2_", "3_"], self._split(plan.items), strict=False)
        ]
        # torch's own threads would lose what they raise, and the files with it.
        with ThreadPoolExecutor(len(parts), "checkpoint") as threads:
            written = list(threads.map(lambda part: super(_Writer, self).write_data(part, planner).value(), parts))
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([result for results in written for result in results])
        return done

    def _split(self, items: list[WriteItem]) -> list[list[WriteItem]]:
        """About as many bytes in each."""
        sizes = [0] * min(self._side_by_side, 1 + sum(map(_size_of, items)) // _ONE_FILE)
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
    """Where torch writes its files, through a recorder."""

    def __init__(self, recorder: ChecksumRecorder) -> None:
        self._recorder = recorder

    def create_stream(self, path: str | os.PathLike, mode: str) -> Any:
        return self._recorder.open(path) if mode == "wb" else super().create_stream(path, mode)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self._recorder.renamed(path, new_path)


@dataclass(frozen=True, eq=False)
class Chunk:
    """A rectangle of the tensor `name`, as large as `tensor`, which may be a view."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def at(self) -> tuple[str, tuple[int, ...]]:
        return self.name, self.offsets


def save_chunks(
    chunks: Iterable[Chunk], folder: Path, recorder: ChecksumRecorder, group: dist.ProcessGroup | None
) -> None:
    """Every rank writes its own; together they must be whole tensors, each element once. A collective of `group`."""
    listed = list(chunks)
    with plain_errors(recorder):
        writer = writer_for([chunk.tensor for chunk in listed], folder, recorder)
        dcp.save({}, storage_writer=writer, planner=_SavePlanner(listed), process_group=group)


def load_chunks(chunks: Iterable[Chunk], folder: Path) -> None:
    """Read into the chunks' tensors, in place; a collective. ValueError for what is not there."""
    with plain_errors():
        dcp.load({}, storage_reader=TensorsOnlyReader(folder), planner=_LoadPlanner(list(chunks)))


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = {chunk.at: chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(chunk) for chunk in self._chunks.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks[index.fqn, tuple(index.offset or ())].tensor.detach()


class _LoadPlanner(TensorsOnlyPlanner):
    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = {chunk.at: chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        named: dict[str, list[Chunk]] = {}
        for chunk in self._chunks.values():
            named.setdefault(chunk.name, []).append(chunk)
        items: list[Any] = []
        for name, chunks in named.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != chunks[0].shape:
                found = list(stored.size) if isinstance(stored, TensorStorageMetadata) else "not there"
                raise ValueError(f"{name} is {list(chunks[0].shape)} here, in the checkpoint {found}.")
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
