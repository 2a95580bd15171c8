"""How much memory a block of code takes at most."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    """Beyond what there was before the block, once it has ended."""


@contextmanager
def peak_of_this_process() -> Iterator[Peak]:
    """Of the memory that is really there (resident)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, peak = _resident("VmRSS"), Peak()
    yield peak
    peak.bytes = _resident("VmHWM") - before


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class TensorBytes(TorchDispatchMode):
    """Within it: the most bytes at a time of tensors that were made in this thread; memory of files does not count."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """`known` were there before."""
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        # A thread of gloo lets go of what it sent a moment after the sender may go on.
        for _ in range(20):
            if self._bytes() <= self.peak:
                return made
            time.sleep(0.001)
        self.peak = self._bytes()
        return made

    def _bytes(self) -> int:
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        return sum(size for _, size in self._live.values())
