"""The weights of a sharded model on their way out: by Hugging Face name, whole, with adapters added in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.models.lora import Adapters
from verl.types.weights import Manifest, TensorSlice, TensorSpec, Wanted
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import groups
from verl.workers.engine.common.safetensors_files import write_safetensors
from verl.workers.engine.common.weights import bucketed
from verl.workers.engine.fsdp.gathering import Route, Strip, cut, gathered, whole_tensor


class ModelWeights:
    """Of the model `hf`, which has `adapters` or not. Names are those of the model without adapters."""

    def __init__(self, hf: Any, adapters: Adapters | None, device: torch.device) -> None:
        self._hf = hf
        self._adapters = adapters
        self._device = device

    def named(self) -> dict[str, torch.Tensor]:
        """Every weight as it is sharded now, adapters left out; tied ones under each of their names."""
        state = self._hf.state_dict()
        return state if self._adapters is None else self._adapters.plain(state)

    @cached_property
    def manifest(self) -> Manifest:
        """Their shapes and types, which never change."""
        return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in self.named().items()}

    def unique(self) -> dict[str, torch.Tensor]:
        """The same, with tied ones under their first name only."""
        named = (name for name, _ in self._hf.named_parameters(remove_duplicate=False))
        tied = set(named) - {name for name, _ in self._hf.named_parameters()}
        return {name: value for name, value in self.named().items() if name not in tied}

    def stored(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold to continue, under the names it has here: what learns."""
        return self.unique() if self._adapters is None else self._adapters.trained(self._hf.state_dict())

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None
    ) -> Iterator[dict[str | TensorSlice, torch.Tensor]]:
        """See `TrainEngine.buckets`. A weight with an adapter is put together whole on every rank."""
        route = None if wanted is None else Route(wanted)
        for bucket in bucketed(self._strips(dtype, max_bytes, route), max_bytes):
            adapted = [strip for strip in bucket if self._has_adapter(strip.name)]
            found = gathered([strip for strip in bucket if strip not in adapted], self._device, route)
            for strip in adapted:
                whole = self.whole(strip.name, strip.value, strip.dtype)
                found |= {strip.name: whole} if route is None else route.own_rows(strip, whole)
            yield found

    def _strips(self, dtype: torch.dtype | None, max_bytes: int, route: Route | None) -> Iterator[tuple[Strip, int]]:
        """What is sent, with its size. Buckets depend only on names and shapes: every rank cuts the same ones."""
        for name, value in self.named().items():
            if route is not None and not route.leads_anywhere(name):
                continue
            target = dtype if dtype is not None and value.is_floating_point() else value.dtype
            size = target.itemsize * value.numel()
            parts = 1 if route is None or self._has_adapter(name) else math.ceil(size / max_bytes)
            for strip in cut(Strip(name, value, target), parts):
                yield strip, size // parts

    def _has_adapter(self, name: str) -> bool:
        return self._adapters is not None and self._adapters.has(name)

    def whole(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight `name`, of which `value` is the shard, with its adapter, on the engine's device; a collective."""
        if self._adapters is None or not self._adapters.has(name):
            return whole_tensor(value, dtype, self._device)
        base = whole_tensor(value, value.dtype, self._device)
        return self._adapters.merged(name, base, self._gathered).to(dtype)

    def write_adapter(self, folder: Path, source: str) -> None:
        """The adapters alone (and a value head) as peft loads them onto the model `source`; a collective.

        Nothing is written for a model without adapters.
        """
        if self._adapters is None:
            return
        names = self._adapters.trained(self._hf.state_dict())
        state = {self._adapters.peft_name(name): self._gathered(value) for name, value in names.items()}
        with groups.failing_together():
            if dist.get_rank() == 0:
                with ChecksumRecorder(folder) as recorder, recorder.open("adapter_model.safetensors") as stream:
                    write_safetensors(state, stream)
                self._adapters.peft_config(source).save_pretrained(str(folder))

    def _gathered(self, value: torch.Tensor) -> torch.Tensor:
        return whole_tensor(value, value.dtype, self._device)
