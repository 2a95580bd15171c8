"""Known GPUs: memory and peak rates, for plans of other machines."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from verl.planning.phases import GB, DeviceMemory

_SIZE = re.compile(r"(\d+(\.\d+)?)\s*(g|gb|gib)?", re.IGNORECASE)


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU per second; `flops` and `bandwidth` are peaks of the data sheet."""

    flops: float
    """Dense bf16 matrix products."""
    bandwidth: float
    """Bytes read or written in device memory."""
    link: float
    """Bytes sent to another GPU of the node: NVLink, or PCIe where there is none."""
    host_link: float
    """Bytes copied between device and host memory in one direction: PCIe 5 (Hopper) or PCIe 4."""


@dataclass(frozen=True)
class GPU:
    """A device."""

    name: str
    memory_gb: float
    """Memory that a process can allocate, in GB of 2^30 bytes."""
    rates: Rates | None = None
    """None: unknown, only the memory was given."""

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory("cuda", int(self.memory_gb * GB), self.name)


_H200 = Rates(989e12, 4.80e12, 350e9, 55e9)
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h200", 139.8, _H200),
        GPU("h100-80g", 79.1, Rates(989e12, 3.35e12, 350e9, 55e9)),
        GPU("a100-80g", 79.1, Rates(312e12, 2.04e12, 230e9, 25e9)),
        GPU("a100-40g", 39.4, Rates(312e12, 1.56e12, 230e9, 25e9)),
        GPU("l40s", 44.4, Rates(362e12, 0.86e12, 25e9, 25e9)),
        GPU("4090", 23.5, Rates(165e12, 1.01e12, 20e9, 25e9)),
    )
}
MEASURED_GPU, MEASURED_GPU_RATES = "h200", _H200
"""Name and rates of the GPU on which the plan was measured."""


def find_gpu(name: str) -> GPU:
    """Return the GPU of this name, or one with this number of GB (`80`, `80GB`). Raises ValueError that lists the known
    names."""
    known = GPUS.get(name.lower())
    if known is not None:
        return known
    size = _SIZE.fullmatch(name.strip())
    if size is not None and 1 <= float(size[1]) <= 1024:
        return GPU(f"GPU of {float(size[1]):g} GB", float(size[1]))
    near = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ValueError(f"--gpu: {name!r} is unknown. {hint}Use one of {', '.join(GPUS)}, or its memory in GB (48).")


def peak_flops(device: DeviceMemory) -> float | None:
    """Return the peak rate of dense bf16 matrix products of a device; None if the device is unknown."""
    rates = gpu_of_device(device.name, device.total).rates if device.kind == "cuda" else None
    return None if rates is None else rates.flops


def gpu_of_device(name: str, total: int) -> GPU:
    """Return the known GPU that NVML calls `name`, with its real memory; rates are None if it is unknown."""
    words = name.lower()
    for gpu in GPUS.values():
        model = gpu.name.split("-")[0]
        if re.search(rf"\b{model}\b", words) and abs(gpu.memory_gb * GB - total) < 0.15 * total:
            return GPU(gpu.name, total / GB, gpu.rates)
    return GPU(name, total / GB)
