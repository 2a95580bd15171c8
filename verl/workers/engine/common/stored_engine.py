"""The half of a training engine that is alike for all: its state on the device, in host memory and on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl.models.loading import ModelKind, empty_model
from verl.types.weights import Bucket, Manifest, Wanted
from verl.workers.engine.common.export import HFExport
from verl.workers.engine.common.frozen import Frozen, SavedState, checked
from verl.workers.engine.common.offload import EngineMemory
from verl.workers.engine.common.saving import BackgroundSaves


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
