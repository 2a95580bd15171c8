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
# Smaller states are written to one file.
_ONE_FILE = 2**28


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
    return _Writer(folder, recorder, max_files=_THREADS if on_host else 1)


@contextmanager
def _plain_errors(recorder: ChecksumRecorder | None = None) -> Iterator[None]:
    """Raise the error of one rank: torch's CheckpointException is a BaseException whose text is all tracebacks."""
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


class _Writer(dcp.FileSystemWriter):
    """Writes through a recorder, and large states as several files in parallel: checksums take as long as the disk."""

    def __init__(self, folder: Path, recorder: ChecksumRecorder, max_files: int) -> None:
        # Copies ahead would be in page-locked memory, rounded up to powers of two and never freed. The recorder's
        # streams sync files to disk when they are closed.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _RecordedFileSystem(recorder)
        self._max_files = max_files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        parts = [
            replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=plan.storage_data.prefix + name))
            for name, items in zip(["", "1_", "2_", "3_"], self._split(plan.items), strict=False)
        ]
        # torch's own threads would lose their errors, and the files with them.
        with ThreadPoolExecutor(len(parts), "checkpoint") as threads:
            written = list(threads.map(lambda part: super(_Writer, self).write_data(part, planner).value(), parts))
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([result for results in written for result in results])
        return done

    def _split(self, items: list[WriteItem]) -> list[list[WriteItem]]:
        """Split the items into lists of about equal size in bytes, one per file."""
        sizes = [0] * min(self._max_files, 1 + sum(map(_size_of, items)) // _ONE_FILE)
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
    """A rectangle of the stored tensor `name`: `tensor`, which may be a view, at `offsets`.

    For ranks whose parts of a tensor are no even shards. Files contain only rectangles and their positions, so that
    engines with other layouts can read them.
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
    """Write this rank's chunks. Those of all ranks must cover every element once. A collective of `group`."""
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
