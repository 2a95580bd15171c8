"""LoraRegistry: loads and unloads the LoRA adapters that requests select by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl.inference.async_engine import AsyncEngine
from verl.inference.lora_files import AdapterFile, read_adapter
from verl.inference.models.adapters import ModelAdapters
from verl.inference.sequence import Adapter

__all__ = ["LoraRegistry"]

_HALT = "adapters"


class LoraRegistry:
    """The adapters of a serving engine. Thread-safe.

    Requests of an unloaded adapter that are still running are completed; its slot is reused afterwards.
    """

    def __init__(self, engine: AsyncEngine, adapters: ModelAdapters, device: torch.device) -> None:
        self._engine, self._adapters, self._device = engine, adapters, device
        self._lock = threading.Lock()
        self._last_id = 0

    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, in the order in which they were loaded."""
        return tuple(self._engine.adapters)

    def load(self, name: str, folder: str) -> None:
        """Load an adapter from a folder in peft's format. ValueError if it does not fit; nothing is changed then."""
        with self._lock:
            if name in self._engine.adapters:
                raise ValueError(f"lora_name: {name!r} is already loaded. Unload it first.")
            adapter = read_adapter(folder)
            self._check(adapter)
            with self._halted():
                slot = self._free_slot()
                self._copy(slot, adapter)
                self._last_id += 1
                self._engine.adapters[name] = Adapter(self._last_id, slot)

    def unload(self, name: str) -> None:
        """Unload an adapter: later requests cannot select it. ValueError if it is not loaded."""
        with self._lock:
            if name not in self._engine.adapters:
                raise ValueError(f"lora_name: {name!r} is not loaded.")
            del self._engine.adapters[name]

    def _check(self, adapter: AdapterFile) -> None:
        options = self._adapters.options
        if adapter.rank > options.rank:
            raise ValueError(
                f"lora_path: the adapter has rank {adapter.rank}, more than --max-lora-rank {options.rank}."
            )
        places = self._adapters.weights(0, adapter.rank)
        for name, tensor in adapter.tensors.items():
            if name not in places:
                raise ValueError(f"lora_path: {name!r} belongs to no linear layer of this model below its output head.")
            if tensor.shape != places[name].shape:
                raise ValueError(
                    f"lora_path: {name!r} is {list(tensor.shape)}; this model needs {list(places[name].shape)}."
                )
        halves = {name.replace(".lora_A.", ".lora_B.") for name in adapter.tensors}
        missing = sorted(half for half in halves if not {half, half.replace("_B.", "_A.")} <= adapter.tensors.keys())
        if missing:
            raise ValueError(f"lora_path: one of the two matrices of {missing[0]!r} is missing.")

    def _free_slot(self) -> int:
        occupied = {adapter.slot for adapter in (*self._engine.adapters.values(), *self._engine.used_adapters())}
        free = [slot for slot in range(self._adapters.options.slots) if slot not in occupied]
        if not free:
            raise ValueError(
                f"lora_name: all {self._adapters.options.slots} slots are in use. Unload an adapter, wait until its"
                " requests are finished, or start the server with a larger --max-loras."
            )
        return free[0]

    @torch.no_grad()
    def _copy(self, slot: int, adapter: AdapterFile) -> None:
        self._adapters.clear(slot)
        places = self._adapters.weights(slot, adapter.rank)
        for name, tensor in adapter.tensors.items():
            places[name].copy_(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps run on another stream

    @contextmanager
    def _halted(self) -> Iterator[None]:
        self._engine.halt(_HALT)
        try:
            yield
        finally:
            self._engine.resume(_HALT)
