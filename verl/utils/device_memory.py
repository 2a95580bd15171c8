"""Device memory in use: what torch's allocator holds, and what was mapped beside it (the rollout engine's regions)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_mapped: dict[int, int] = {}
_mapped_peak: dict[int, int] = {}


def note_mapped(index: int, size: int) -> None:
    """`size` bytes more (or, negative, fewer) are mapped on the device of this index, outside torch's allocator."""
    with _lock:
        _mapped[index] = _mapped.get(index, 0) + size
        _mapped_peak[index] = max(_mapped_peak.get(index, 0), _mapped[index])


def memory_in_use(device: torch.device, reset: bool = False) -> tuple[int, int]:
    """(most bytes since the last reset, bytes now) that this process holds on a GPU; (0, 0) on a CPU.

    The two kinds may have had their peaks at different moments: the sum is then a little more than there ever was.
    """
    import torch

    if device.type != "cuda":
        return 0, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        peak = torch.cuda.max_memory_allocated(index) + _mapped_peak.get(index, 0)
        now = torch.cuda.memory_allocated(index) + _mapped.get(index, 0)
        if reset:
            torch.cuda.reset_peak_memory_stats(index)
            _mapped_peak[index] = _mapped.get(index, 0)
    return peak, now
