"""Measure the peak memory of a block of code."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Peak:
    bytes: int = 0
    """Increase over the value before the block; set when the block ends."""


@contextmanager
def peak_process_memory() -> Iterator[Peak]:
    """Measure the peak of the resident memory of this process."""
    gc.collect()
    _return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before, peak = _resident("VmRSS"), Peak()
    yield peak
    peak.bytes = _resident("VmHWM") - before


def _return_free_memory() -> None:
    """Make malloc return its free memory: allocations that reuse it would not increase the resident memory."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


class TensorBytes(TorchDispatchMode):
    """Context that measures the peak bytes of tensors created in this thread, without memory-mapped files."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """`known`: existing tensors, which do not count."""
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        # A gloo thread frees a sent tensor shortly after the send has returned.
        for _ in range(20):
            if self._bytes() <= self.peak:
                return result
            time.sleep(0.001)
        self.peak = self._bytes()
        return result

    def _bytes(self) -> int:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values())
