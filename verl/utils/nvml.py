"""Memory, utilization and power of a GPU, from NVML; no package is needed besides the driver."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

__all__ = ["DeviceUsage", "device_usage"]


@dataclass(frozen=True)
class DeviceUsage:
    """Use of a GPU now; None where the driver does not report a value."""

    uuid: str
    name: str
    memory_used: int | None
    """Bytes in use, by all processes."""
    memory_total: int | None
    utilization: float | None
    """Share of the driver's last sampling period, at most a second, in which a kernel was running."""
    power: float | None
    """Watts."""


def device_usage(uuid: str) -> DeviceUsage | None:
    """Return the use of the GPU with this UUID (`GPU-…`); None if NVML is not available or does not know it."""
    library, handle = _library(), ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    memory = _read(library.nvmlDeviceGetMemoryInfo, handle, _Memory())
    rates = _read(library.nvmlDeviceGetUtilizationRates, handle, _Utilization())
    milliwatts = _read(library.nvmlDeviceGetPowerUsage, handle, ctypes.c_uint())
    name = ctypes.create_string_buffer(96)
    library.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    return DeviceUsage(
        uuid=uuid,
        name=name.value.decode(errors="replace"),
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        utilization=None if rates is None else rates.gpu / 100,
        power=None if milliwatts is None else milliwatts.value / 1000,
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


@functools.cache
def _library() -> Any:
    """NVML, initialized once per process; None if it is not available."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def _read(function: Any, handle: ctypes.c_void_p, value: Any) -> Any:
    """Return the value after NVML has written it; None if NVML reports an error."""
    return None if function(handle, ctypes.byref(value)) else value
