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
from verl.types.weights import Bucket, Manifest, Wanted
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.utils.concurrency import BackgroundTask
from verl.utils.torch_archive import load_archive
from verl.workers.engine.common import groups
from verl.workers.engine.common.checkpoint_compatibility import ABOUT
from verl.workers.engine.common.hf_export import HFExport
from verl.workers.engine.common.host_snapshot import HostSnapshot
from verl.workers.engine.common.offload import EngineMemory, local_shard, sharded_like
from verl.workers.engine.common.optim import LossScale


def checked(path: str | os.PathLike, contents: Collection[str]) -> Path:
    """The folder of a checkpoint; ValueError for contents that there are not."""
    unknown = sorted(set(contents) - set(CHECKPOINT_CONTENTS))
    if unknown:
        raise ValueError(f"checkpoint contents: {unknown} are unknown. Use some of {', '.join(CHECKPOINT_CONTENTS)}.")
    return Path(path)


@dataclass(frozen=True)
class Frozen:
    """What a checkpoint of some contents holds of an engine at one moment: live tensors, or copies of them."""

    contents: Collection[str]
    weights: Mapping[str, torch.Tensor]
    """Under names that the engine's state gives them."""
    moments: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    about: Mapping[str, Any]

    def with_tensors(self, change: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> Frozen:
        """With others in place of all tensors, which `change` gives by name."""
        names = {f"weights/{name}": value for name, value in self.weights.items()}
        names |= {f"moments/{name}": value for name, value in self.moments.items()}
        found = change(names)
        return replace(
            self,
            weights={name: found[f"weights/{name}"] for name in self.weights},
            moments={name: found[f"moments/{name}"] for name in self.moments},
        )

    def write_alone(self, recorder: ChecksumRecorder) -> None:
        """The files of a checkpoint that are one rank's: what the model is, the schedule and the random states."""
        if "model" in self.contents:
            with recorder.open(ABOUT) as stream:
                stream.write(json.dumps(self.about, indent=1).encode())
        if "extra" in self.contents:
            with recorder.open(_EXTRA) as stream:
                torch.save(dict(self.extra), stream)


class SavedState(Protocol):
    """What an engine has that changes as it learns."""

    def sizes(self, contents: Collection[str]) -> list[int]:
        """Bytes that this rank holds of each tensor of such a checkpoint, with all moments. No collective."""

    def write(self, frozen: Frozen, folder: Path, export: HFExport | None, group: dist.ProcessGroup | None) -> None:
        """All files of a checkpoint; a collective of `group`. Reads nothing of the engine that changes."""


_EXTRA = "extra.pt"


def extra_state(schedule_step: int, loss_scale: LossScale, device: torch.device) -> dict[str, Any]:
    """Schedule, loss scale and the random states of all ranks; a collective."""
    random = random_states(device)
    return {"schedule_step": schedule_step, "loss_scale": loss_scale.state_dict(), "random": random}


def restore_extra(folder: Path, loss_scale: LossScale, device: torch.device) -> int:
    """The same from a checkpoint; gives the schedule's step."""
    extra = load_archive(folder / _EXTRA)
    loss_scale.load_state_dict(extra["loss_scale"])
    restore_random_state(extra["random"], device)
    return extra["schedule_step"]


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


class BackgroundSaves:
    """One at a time: there is one place in host memory for copies. Made by all ranks together."""

    def __init__(self, device: torch.device, mesh: DeviceMesh | None, expected: Collection[str]) -> None:
        """`mesh` is that of tensors which torch shards; `expected`: contents of checkpoints for which there is to be
        memory beforehand."""
        self._expected = expected
        self._group = groups.group_for_files()
        # Copies are laid out as the tensors on the devices are; nothing is sent over this mesh.
        if mesh is not None and device.type != "cpu":
            mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.mesh_dim_names)
        self._mesh = mesh
        self._snapshot = HostSnapshot(device)
        self._writing = BackgroundTask("checkpoint")

    def make_room(self, state: SavedState) -> None:
        """For what is expected, in the background, once."""
        expected, self._expected = self._expected, ()
        if expected:
            self._snapshot.prepare(state.sizes(expected))

    def settle(self) -> None:
        """Wait for the save before this one; raise what went wrong with it if nobody asked for that."""
        self._writing.wait_idle()

    def begin(
        self, state: SavedState, frozen: Frozen, memory: EngineMemory, folder: Path, export: HFExport | None
    ) -> None:
        """Copy the tensors of `frozen` from where they are now, and write the copy under `folder`."""

        def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            mine = {name: local_shard(value) for name, value in tensors.items()}
            taken = self._snapshot.take(mine, memory.lend(mine, self._snapshot.wait))
            return {name: sharded_like(value, taken[name], self._mesh) for name, value in tensors.items()}

        # A rank that has no room for its copy leaves none of the others waiting for it in the writing.
        with groups.failing_together(self._group):
            copy = frozen.with_tensors(copied)

        def write() -> None:
            with groups.failing_together(self._group):
                self._snapshot.check()
            state.write(copy, folder, export, self._group)

        self._writing.start(write)

    def finish(self) -> None:
        """Wait until the save begun last is written, and raise what went wrong."""
        self._writing.result()


class Weights(Protocol):
    """An engine's weights by Hugging Face name."""

    @property
    def manifest(self) -> Manifest:
        """Shapes and types of all of them."""

    def buckets(self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None) -> Iterator[Bucket]:
        """See `TrainEngine.buckets`."""

    def everything(self) -> Mapping[str, torch.Tensor]:
        """This rank's tensors as they are now, under names of the engine's own."""

    def whole(
        self, everything: Mapping[str, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Callable[[str], torch.Tensor | None]:
        """By the name of a weight: all of it, in host memory of rank 0 alone. A collective."""


class StoredState(SavedState, Protocol):
    """What of an engine a checkpoint holds."""

    def freeze(self, contents: Collection[str]) -> Frozen:
        """The live tensors, and a copy of all that is small. A collective."""

    def check_fits(self, folder: Path, contents: Collection[str]) -> None:
        """Raise ValueError for a checkpoint of another model, before anything is read."""

    def load(self, folder: Path, contents: Collection[str]) -> None:
        """Read back what `write` wrote."""


class StoredEngine:
    """See `verl.workers.engine.base.TrainEngine`; an engine made of these parts has the methods below."""

    device: torch.device
    compute_dtype: torch.dtype
    kind: ModelKind
    hf_config: Any
    _trust_remote_code: bool
    _source: str
    """Where the model was loaded from."""
    _weights: Weights
    _state: StoredState
    _memory: EngineMemory
    _offloads: tuple[bool, bool]
    """(weights, moments) that are not on the device between phases."""
    _saves: BackgroundSaves | None
    _exports: dict[torch.dtype, HFExport]

    def sound(self, thorough: bool) -> bool:
        raise NotImplementedError

    def manifest(self) -> Manifest:
        """Every weight of the whole model under its Hugging Face name (tied ones under each of their names)."""
        return self._weights.manifest

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None = None
    ) -> Iterator[Bucket]:
        """Those weights, or what each rank wants of them, on the engine's device; all ranks walk in lockstep."""
        self.to("device", optimizer=False)
        return self._weights.buckets(dtype, max_bytes, wanted)

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights (with any gradients) and moments to host memory ("cpu") or back ("device")."""
        if device == "device":
            self._memory.come_back(model, optimizer)
        else:
            self._memory.leave(model, optimizer)

    def park(self) -> None:
        """Between phases: what `param_offload` and `optimizer_offload` say moves to host memory."""
        if any(self._offloads):
            self.to("cpu", *self._offloads)

    @contextmanager
    def awake(self, optimizer: bool = True) -> Iterator[None]:
        """For one phase: on the device, moments too if they are used; parked afterwards."""
        self.to("device", optimizer=optimizer)
        try:
            yield
        finally:
            self.park()

    def save(self, path: str | os.PathLike, contents: Collection[str] = ("model", "optimizer", "extra")) -> None:
        """Write the named contents, and wait until that is done."""
        self.begin_save(path, contents)
        self.finish_save()

    def begin_save(self, path: str | os.PathLike, contents: Collection[str]) -> None:
        """Start to write the named contents in shards under `path`; `hf_model` whole, under `path/huggingface`.

        `model` of a model with adapters is what learns, and beside it `lora_adapter` as peft loads it. Without room
        for a copy of all that, it is written here and now.
        """
        folder = checked(path, contents)
        if self._saves is not None:
            self._saves.settle()
        with self.awake(optimizer=False):
            if not self.sound(thorough=True):
                raise FloatingPointError("the weights are not finite, or give no finite numbers: they are not saved")
        export = self._export(self.compute_dtype) if "hf_model" in contents else None
        if self._saves is not None:
            self._saves.begin(self._state, self._state.freeze(contents), self._memory, folder, export)
            return
        with self.awake():
            self._memory.ready()
            self._state.write(self._state.freeze(contents), folder, export, group=None)

    def finish_save(self) -> None:
        """Wait until what was begun is written, and raise what went wrong; no collective, and from any thread."""
        if self._saves is not None:
            self._saves.finish()

    def load(self, path: str | os.PathLike, contents: Collection[str] = ("model", "optimizer", "extra")) -> None:
        """Read back what `save` wrote, with this or another number of ranks."""
        folder = checked(path, contents)
        self._state.check_fits(folder, contents)
        self.to("device")
        self._memory.before_change()
        self._state.load(folder, contents)

    def export_hf(self, path: str | os.PathLike, dtype: torch.dtype | None = None) -> None:
        """Write safetensors and config as transformers loads them, in the compute dtype unless `dtype` is given."""
        target = dtype or self.compute_dtype
        self.to("device", optimizer=False)
        self._export(target).write(self._weights.whole(self._weights.everything(), target, None), Path(path), None)

    def _export(self, dtype: torch.dtype) -> HFExport:
        """Made here, and kept: making an empty model changes torch's defaults for a moment, for all threads."""
        if dtype not in self._exports:
            skeleton = empty_model(self.hf_config, self.kind, dtype, self._trust_remote_code)
            self._exports[dtype] = HFExport(skeleton, dtype, self._source)
        return self._exports[dtype]
