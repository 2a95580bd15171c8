"""How many GPUs this machine offers, found without torch."""

from __future__ import annotations

import os
from pathlib import Path


def visible_gpus() -> int:
    """GPUs that a process started here could use: those present, limited by CUDA_VISIBLE_DEVICES."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*"))) or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if Path("/dev/dxg").exists():  # WSL has no device files
        present = max(present, 1)
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return present
    # As CUDA reads it: the list ends at the first entry that is not a device.
    count = 0
    for name in allowed.split(","):
        if name.strip() in ("", "-1"):
            break
        count += 1
    if "MIG-" in allowed:  # slices of one GPU
        return count if present else 0
    return min(count, present)
