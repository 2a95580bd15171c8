"""Sharded state on disk (torch.distributed.checkpoint): written by any number of ranks, read by any other."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from verl.types.weights import TensorSpec
from verl.utils.checkpoint.manifest import ChecksumRecorder

_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
_ONE_FILE = 2**28


def save_tensors(
    tensors: Mapping[str, torch.Tensor], folder: Path, recorder: ChecksumRecorder, group: dist.ProcessGroup | None
) -> None:
    """Every rank writes its shards, their checksums taken by its `recorder`; a collective of `group`.

    What is on a device comes to host memory tensor by tensor.
    """
    # A checksum takes as long as the disk: what is in host memory is written as several files side by side.
    here = all(value.device.type == "cpu" for value in tensors.values())
    threads = _THREADS if here and sum(value.nbytes for value in tensors.values()) > _ONE_FILE else 1
    # Copies made ahead would lie in page-locked memory, rounded up to powers of two and never given back. Files are
    # brought to disk by the recorder's streams when they close.
    writer = dcp.FileSystemWriter(folder, sync_files=False, thread_count=threads, per_thread_copy_ahead=0)
    writer.fs = _RecordedFileSystem(recorder)
    with _plain_errors(recorder):
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def load_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read into the given tensors (sharded as they are now), in place; a collective. All of them must be there."""
    with _plain_errors():
        dcp.load(dict(tensors), checkpoint_id=folder)


@contextmanager
def _plain_errors(recorder: ChecksumRecorder | None = None) -> Iterator[None]:
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
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder}: no checkpoint here (.metadata is missing). Choose a step that was saved whole.")
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: TensorSpec(tuple(entry.size), entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


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


class _RecordedFileSystem(FileSystem):
    """Where torch writes its files, through a recorder."""

    def __init__(self, recorder: ChecksumRecorder) -> None:
        self._recorder = recorder

    def create_stream(self, path: str | os.PathLike, mode: str) -> Any:
        return self._recorder.open(path) if mode == "wb" else super().create_stream(path, mode)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self._recorder.renamed(path, new_path)
