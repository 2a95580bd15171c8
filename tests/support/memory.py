"""How much memory a block of code takes at most."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


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
