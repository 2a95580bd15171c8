"""The weights of a sharded model on their way out: by Hugging Face name, whole, with adapters added in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from verl.workers.engine.fsdp.gathering import Route, Strip, cut, gathered, on_first_rank, whole_tensor


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

    def everything(self) -> dict[str, torch.Tensor]:
        """Every tensor, adapters' too, under the name it has here; tied ones under their first."""
        return {name: value for name, value in self._hf.state_dict().items() if self._tied.get(name, name) == name}

    def stored(self) -> dict[str, torch.Tensor]:
        """What of that a checkpoint must hold to continue: what learns."""
        return self.trained(self.everything())

    def trained(self, everything: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of every tensor that learn."""
        return dict(everything) if self._adapters is None else self._adapters.trained(everything)

    @cached_property
    def _tied(self) -> dict[str, str]:
        """Of every parameter the first name."""
        first: dict[int, str] = {}
        named = self._hf.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(value), name) for name, value in named}

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None
    ) -> Iterator[dict[str | TensorSlice, torch.Tensor]]:
        """See `TrainEngine.buckets`. A weight with an adapter is put together whole on every rank."""
        route = None if wanted is None else Route(wanted)
        for bucket in bucketed(self._strips(dtype, max_bytes, route), max_bytes):
            adapted = [strip for strip in bucket if self._has_adapter(strip.name)]
            found = gathered([strip for strip in bucket if strip not in adapted], self._device, route)
            matrices = self._hf.state_dict() if adapted else {}
            for strip in adapted:
                whole = self._merged(strip, matrices)
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

    def _merged(self, strip: Strip, matrices: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert self._adapters is not None
        parts = [strip.value, *(matrices[name] for name in self._adapters.matrices(strip.name))]
        found = [whole_tensor(part, part.dtype, self._device) for part in parts]
        return self._adapters.merged(strip.name, *found).to(strip.dtype)

    def _has_adapter(self, name: str) -> bool:
        return self._adapters is not None and self._adapters.has(name)

    def whole(
        self, everything: Mapping[str, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Callable[[str], torch.Tensor | None]:
        """By the name of a weight: all of it with its adapter, in host memory of rank 0 alone. A collective.

        `everything`: these tensors, or what they were at some time.
        """
        plain = everything if self._adapters is None else self._adapters.plain(everything)

        def of(name: str) -> torch.Tensor | None:
            value = plain[self._tied.get(name, name)]
            target = dtype if value.is_floating_point() else value.dtype
            if self._adapters is None or not self._adapters.has(name):
                return on_first_rank(value, target, group)
            parts = [value, *(everything[matrix] for matrix in self._adapters.matrices(name))]
            found = [on_first_rank(part, part.dtype, group) for part in parts]
            return self._adapters.merged(name, *found).to(target) if dist.get_rank() == 0 else None

        return of

    def write_adapter(
        self, trained: Mapping[str, torch.Tensor], folder: Path, source: str, group: dist.ProcessGroup | None
    ) -> None:
        """The adapters alone (and a value head) as peft loads them onto the model `source`; a collective.

        Nothing is written for a model without adapters.
        """
        if self._adapters is None:
            return
        state = {
            self._adapters.peft_name(name): on_first_rank(value, value.dtype, group) for name, value in trained.items()
        }
        with groups.failing_together(group):
            if dist.get_rank() == 0:
                with ChecksumRecorder(folder) as recorder, recorder.open("adapter_model.safetensors") as stream:
                    write_safetensors(state, state.values(), stream)
                self._adapters.peft_config(source).save_pretrained(str(folder))
