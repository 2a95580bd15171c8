"""Rectangles of named tensors on disk: the files of `checkpoint`, for ranks whose parts of a tensor are no even shards.

What one engine writes so, an engine that shards in another way reads: files say only which rectangle is where.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common.checkpoint import plain_errors, writer_for
from verl.workers.engine.common.dcp_reader import TensorsOnlyPlanner, TensorsOnlyReader


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
