"""The accelerator of this process: its name, copies to it and the memory in use. Imports torch only when called."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    is_cuda_available: bool

__all__ = [
    "CaptureGate",
    "capture_gate",
    "copy_to_device",
    "get_device_id",
    "get_device_name",
    "get_torch_device",
    "is_cuda_available",
    "memory_in_use",
    "record_mapped_bytes",
    "resolve_dtype",
]

_lock = threading.Lock()
# By device index: bytes mapped outside torch's allocator, and the peak of the sum with torch's until the last change.
_mapped: dict[int, int] = {}
_earlier_peak: dict[int, int] = {}


def get_device_name() -> str:
    """Return `"cuda"` if torch sees a GPU, otherwise `"cpu"`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def get_torch_device() -> ModuleType:
    """Return `torch.cuda` or `torch.cpu`, with `synchronize`, `current_device`, `Stream`, …"""
    import torch

    return getattr(torch, get_device_name())


def get_device_id() -> int | str:
    """Return the argument of `tensor.to(...)` for the device of this process: the GPU's index, or `"cpu"`."""
    return get_torch_device().current_device()


def resolve_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """Return the torch dtype of a `dtype` key; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    import torch

    if name == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def copy_to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy many small host tensors to `device`.

    On a GPU they are concatenated by dtype in pinned memory: one asynchronous copy per dtype.
    """
    import torch

    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    copies: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype: None for tensor in tensors}:
        chosen = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        sizes = [tensors[i].numel() for i in chosen]
        pinned = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        torch.cat([tensors[i].reshape(-1) for i in chosen], out=pinned)
        parts = pinned.to(device, non_blocking=True).split(sizes)
        copies.update({i: part.view(tensors[i].shape) for i, part in zip(chosen, parts, strict=True)})
    return [copies[i] for i in range(len(tensors))]


def record_mapped_bytes(index: int, size: int) -> None:
    """Record that `size` bytes (negative: unmapped) are mapped on the device `index` outside torch's allocator."""
    import torch

    with _lock:
        # Torch's peak until now was reached with the old mappings.
        _earlier_peak[index] = _peak(index)
        torch.cuda.reset_peak_memory_stats(index)
        _mapped[index] = _mapped.get(index, 0) + size


def memory_in_use(device: torch.device, reset: bool = False) -> tuple[int, int]:
    """Return (peak bytes since the last reset, current bytes) of this process on a GPU; (0, 0) on a CPU.

    Both are sums of torch's allocator and of recorded mappings.
    """
    import torch

    if device.type != "cuda":
        return 0, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        peak = _peak(index)
        now = torch.cuda.memory_allocated(index) + _mapped.get(index, 0)
        if reset:
            torch.cuda.reset_peak_memory_stats(index)
            _earlier_peak[index] = 0
    return peak, now


def _peak(index: int) -> int:
    import torch

    return max(_earlier_peak.get(index, 0), torch.cuda.max_memory_allocated(index) + _mapped.get(index, 0))


class CaptureGate:
    """Keeps captures of CUDA graphs apart from CUDA work of other threads of this process.

    During a capture, no other thread may synchronise with the device, free device memory or draw random numbers on it:
    one of both would fail. Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        """Number of threads in `work`."""
        self._capturing = False
        self._thread = threading.local()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Context of CUDA work, which waits for a capture and prevents others. Contexts of a thread may be nested."""
        outer = getattr(self._thread, "works", False)
        if outer:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context within `work` in which the thread waits for another one, and captures are possible."""
        inside = getattr(self._thread, "works", False)
        if inside:
            self._leave()
        try:
            yield
        finally:
            if inside:
                self._enter()

    @contextmanager
    def capture(self) -> Iterator[bool]:
        """Context of a capture; yields False if work or another capture of this process is in progress."""
        with self._changed:
            permitted = not self._working and not self._capturing
            self._capturing = self._capturing or permitted
        try:
            yield permitted
        finally:
            if permitted:
                with self._changed:
                    self._capturing = False
                    self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._working += 1
        self._thread.works = True

    def _leave(self) -> None:
        self._thread.works = False
        with self._changed:
            self._working -= 1


capture_gate = CaptureGate()
"""The gate of this process. Calls on the compute lane of a worker run in its `work()`."""


def __getattr__(name: str) -> Any:
    if name != "is_cuda_available":
        raise AttributeError(f"module 'verl.utils.device' has no attribute {name!r}")
    return get_device_name() == "cuda"
