"""Sharded state on disk (torch.distributed.checkpoint): written by any number of ranks, read by any other."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
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


def random_states(device: torch.device) -> list[dict[str, Any]]:
    """The state of every rank's generators, by rank; a collective."""
    kind, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def restore_random_state(states: list[dict[str, Any]], device: torch.device) -> None:
    """This rank's generators; a rank that did not exist when the states were taken keeps its own."""
    if dist.get_rank() >= len(states):
        return
    state = states[dist.get_rank()]
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


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
