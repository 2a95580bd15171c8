"""Checkpoints of a training engine: state snapshots, background saves, loading and export."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.config.names import CHECKPOINT_CONTENTS
from verl.models.loading import ModelKind, empty_model
from verl.types.weights import Bucket, Manifest, RequestedRows
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.utils.concurrency import BackgroundTask
from verl.utils.torch_archive import load_archive
from verl.workers.engine.base import UnmergedSource
from verl.workers.engine.common import groups
from verl.workers.engine.common.checkpoint_compatibility import MODEL_JSON
from verl.workers.engine.common.hf_export import HFExport
from verl.workers.engine.common.host_snapshot import HostSnapshot
from verl.workers.engine.common.offload import EngineMemory, local_shard, sharded_like
from verl.workers.engine.common.optim import LossScale

_EXTRA = "extra.pt"


@dataclass(frozen=True)
class StateSnapshot:
    """The state of an engine for a checkpoint with `contents`: live tensors, or copies of them."""

    contents: Collection[str]
    weights: Mapping[str, torch.Tensor]
    """By the names of the engine's `CheckpointState`."""
    moments: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    """Schedule, loss scale and random states (`extra_state`)."""
    model_info: Mapping[str, Any]
    """Contents of `model.json`."""

    def map_tensors(
        self, function: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    ) -> StateSnapshot:
        """Return a snapshot with all tensors replaced by `function`, which maps all of them by name."""
        named = {f"weights/{name}": value for name, value in self.weights.items()}
        named |= {f"moments/{name}": value for name, value in self.moments.items()}
        mapped = function(named)
        return replace(
            self,
            weights={name: mapped[f"weights/{name}"] for name in self.weights},
            moments={name: mapped[f"moments/{name}"] for name in self.moments},
        )

    def write_unsharded(self, recorder: ChecksumRecorder) -> None:
        """Write the files that one rank writes: `model.json` and the extra state."""
        if "model" in self.contents:
            with recorder.open(MODEL_JSON) as stream:
                stream.write(json.dumps(self.model_info, indent=1).encode())
        if "extra" in self.contents:
            with recorder.open(_EXTRA) as stream:
                torch.save(dict(self.extra), stream)


class NamedWeights(Protocol):
    """An engine's weights by Hugging Face name."""

    @property
    def manifest(self) -> Manifest:
        """Shapes and dtypes of all weights."""

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None
    ) -> Iterator[Bucket]:
        """See `TrainEngine.buckets`."""

    def local_tensors(self) -> Mapping[str, torch.Tensor]:
        """This rank's live tensors, by engine-specific names."""

    def gather_on_rank0(
        self, local_tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Callable[[str], torch.Tensor | None]:
        """Return a function from the name of a weight to the full tensor in host memory of rank 0, None elsewhere.

        The function is a collective of `group`. `local_tensors`: the result of `local_tensors()`, or a snapshot of it.
        """


class CheckpointState(Protocol):
    """The part of an engine that changes during training."""

    def snapshot(self, contents: Collection[str]) -> StateSnapshot:
        """Return the live tensors and a copy of all small state. A collective."""

    def sizes(self, contents: Collection[str]) -> list[int]:
        """Return the size in bytes of each of this rank's tensors in a checkpoint with `contents`. No collective.

        All moments are included, also before the first step.
        """

    def write(
        self, snapshot: StateSnapshot, folder: Path, export: HFExport | None, group: dist.ProcessGroup | None
    ) -> None:
        """Write all files of a checkpoint; a collective of `group`. Reads no live state of the engine."""

    def check_fits(self, folder: Path, contents: Collection[str]) -> None:
        """Raise ValueError, before anything is loaded, if the checkpoint is of another model."""

    def load(self, folder: Path, contents: Collection[str]) -> None:
        """Load a checkpoint written by `write` onto the device."""


class BackgroundSaver:
    """Copies an engine's state to host memory and writes the copy in the background, one save at a time.

    Creating one is a collective.
    """

    def __init__(self, device: torch.device, mesh: DeviceMesh | None, expected_contents: Collection[str]) -> None:
        """`mesh`: the mesh of the engine's DTensors, if any. `expected_contents`: the contents of future checkpoints,
        for which `preallocate` allocates memory."""
        self._expected_contents = expected_contents
        self._group = groups.background_group()
        # Copies have the layout of the tensors on the devices; no communication happens over this mesh.
        if mesh is not None and device.type != "cpu":
            mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.mesh_dim_names)
        self._mesh = mesh
        self._host_snapshot = HostSnapshot(device)
        self._writing = BackgroundTask("checkpoint")

    def preallocate(self, state: CheckpointState) -> None:
        """Allocate host memory for the expected contents in the background; no effect after the first call."""
        contents, self._expected_contents = self._expected_contents, ()
        if contents:
            self._host_snapshot.prepare(state.sizes(contents))

    def wait_for_save(self) -> None:
        """Wait for the previous save; raise its error, unless `finish` has raised it."""
        self._writing.wait_idle()

    def begin(
        self,
        state: CheckpointState,
        snapshot: StateSnapshot,
        memory: EngineMemory,
        folder: Path,
        export: HFExport | None,
    ) -> None:
        """Start copying the tensors of `snapshot`; the copy is then written under `folder` in the background."""

        def copy_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            shards = {name: local_shard(value) for name, value in tensors.items()}
            copies = self._host_snapshot.take(shards, memory.byte_views(shards, self._host_snapshot.wait))
            return {name: sharded_like(value, copies[name], self._mesh) for name, value in tensors.items()}

        # If one rank has no memory for its copy, all ranks raise instead of waiting for that rank while writing.
        with groups.raise_on_all_ranks(self._group):
            copied = snapshot.map_tensors(copy_tensors)

        def write() -> None:
            with groups.raise_on_all_ranks(self._group):
                self._host_snapshot.check()
            state.write(copied, folder, export, self._group)

        self._writing.start(write)

    def finish(self) -> None:
        """Wait until the latest save is written, and raise its error."""
        self._writing.result()


class EngineCheckpointMixin:
    """Weight buckets, offloading, checkpoints and export of a `TrainEngine`, implemented on the attributes below."""

    device: torch.device
    compute_dtype: torch.dtype
    kind: ModelKind
    hf_config: Any
    _trust_remote_code: bool
    _source: str
    """Folder or hub name of the model; "" for a model in memory."""
    _weights: NamedWeights
    _state: CheckpointState
    memory: EngineMemory
    _offloads: tuple[bool, bool]
    """Whether (weights, optimizer state) are offloaded between phases."""
    _saver: BackgroundSaver | None
    _exports: dict[torch.dtype, HFExport]

    def weights_finite(self, thorough: bool) -> bool:
        raise NotImplementedError

    def manifest(self) -> Manifest:
        """See `TrainEngine.manifest`; tied weights appear under each of their names."""
        return self._weights.manifest

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None = None
    ) -> Iterator[Bucket]:
        """See `TrainEngine.buckets`; tensors are on the engine's device."""
        self.to("device", optimizer=False)
        return self._weights.buckets(dtype, max_bytes, requested)

    def unmerged(self) -> UnmergedSource | None:
        """See `TrainEngine.unmerged`."""
        return None

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """See `TrainEngine.to`; gradients move with the model."""
        if device == "device":
            self.memory.reload(model, optimizer)
        else:
            self.memory.offload(model, optimizer)

    def offload(self) -> None:
        """See `TrainEngine.offload`; configured by `param_offload` and `optimizer_offload`."""
        if any(self._offloads):
            self.to("cpu", *self._offloads)

    @contextmanager
    def on_device(self, optimizer: bool = True) -> Iterator[None]:
        """See `TrainEngine.on_device`."""
        self.to("device", optimizer=optimizer)
        try:
            yield
        finally:
            self.offload()

    def save(self, path: str | os.PathLike, contents: Collection[str] = ("model", "optimizer", "extra")) -> None:
        """See `TrainEngine.save`."""
        self.begin_save(path, contents)
        self.finish_save()

    def begin_save(self, path: str | os.PathLike, contents: Collection[str]) -> None:
        """See `TrainEngine.begin_save`; an engine without a background saver writes before this returns."""
        folder = checkpoint_folder(path, contents)
        if self._saver is not None:
            self._saver.wait_for_save()
        with self.on_device(optimizer=False):
            if not self.weights_finite(thorough=True):
                raise FloatingPointError("the weights, or the model's outputs, are not finite: no checkpoint is saved")
        export = self._export(self.compute_dtype) if "hf_model" in contents else None
        if self._saver is not None:
            self._saver.begin(self._state, self._state.snapshot(contents), self.memory, folder, export)
            return
        with self.on_device():
            self.memory.wait_ready()
            self._state.write(self._state.snapshot(contents), folder, export, group=None)

    def finish_save(self) -> None:
        """See `TrainEngine.finish_save`."""
        if self._saver is not None:
            self._saver.finish()

    def load(self, path: str | os.PathLike, contents: Collection[str] = ("model", "optimizer", "extra")) -> None:
        """See `TrainEngine.load`."""
        folder = checkpoint_folder(path, contents)
        self._state.check_fits(folder, contents)
        self.to("device")
        self.memory.prepare_update()
        self._state.load(folder, contents)

    def export_hf(self, path: str | os.PathLike, dtype: torch.dtype | None = None) -> None:
        """Write the full model in Hugging Face format, in the compute dtype unless `dtype` is given."""
        target = dtype or self.compute_dtype
        self.to("device", optimizer=False)
        gather = self._weights.gather_on_rank0(self._weights.local_tensors(), target, None)
        self._export(target).write(gather, Path(path), None)

    def _export(self, dtype: torch.dtype) -> HFExport:
        """Return the export for `dtype`, created at the first call. Must not run in a background thread: building an
        empty model changes global defaults of torch for all threads."""
        if dtype not in self._exports:
            skeleton = empty_model(self.hf_config, self.kind, dtype, self._trust_remote_code)
            self._exports[dtype] = HFExport(skeleton, dtype, self._source)
        return self._exports[dtype]


def checkpoint_folder(path: str | os.PathLike, contents: Collection[str]) -> Path:
    """Return `path`; ValueError for unknown `contents`."""
    unknown = sorted(set(contents) - set(CHECKPOINT_CONTENTS))
    if unknown:
        raise ValueError(f"checkpoint contents: {unknown} are unknown. Choose from: {', '.join(CHECKPOINT_CONTENTS)}.")
    return Path(path)


def extra_state(schedule_step: int, loss_scale: LossScale, device: torch.device) -> dict[str, Any]:
    """Return schedule step, loss scale and the random states of all ranks. A collective."""
    random = random_states(device)
    return {"schedule_step": schedule_step, "loss_scale": loss_scale.state_dict(), "random": random}


def restore_extra(folder: Path, loss_scale: LossScale, device: torch.device) -> int:
    """Restore loss scale and random state from a checkpoint; return the schedule step."""
    extra = load_archive(folder / _EXTRA)
    loss_scale.load_state_dict(extra["loss_scale"])
    restore_random_state(extra["random"], device)
    return extra["schedule_step"]


def random_states(device: torch.device) -> list[dict[str, Any]]:
    """Return the generator states of all ranks, by rank. A collective."""
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
    """Restore this rank's generators; a rank without saved state keeps its own."""
    if dist.get_rank() >= len(states):
        return
    state = states[dist.get_rank()]
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
