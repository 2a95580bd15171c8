"""GPUs and host memory of this machine, read without torch: NVML, a library of the NVIDIA driver, reports the GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIPS = Path("/proc/self/cgroup")


def visible_gpu_count() -> int:
    """Return the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES permits."""
    # A container has device files of its own GPUs only; without device files, the driver lists all of the machine.
    present = len(list(Path("/dev").glob("nvidia[0-9]*"))) or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if Path("/dev/dxg").exists():  # WSL has no device files
        present = max(present, 1)
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return present
    # As in CUDA, the list ends at the first invalid entry.
    count = 0
    for name in allowed.split(","):
        if name.strip() in ("", "-1"):
            break
        count += 1
    if "MIG-" in allowed:  # slices of GPUs: there may be more of them than GPUs
        return count if present else 0
    return min(count, present)


def has_no_gpu() -> bool:
    """Return whether torch's device type cuda is certainly unavailable: all GPUs are hidden, or there is neither an
    NVIDIA (also Jetson, WSL) nor an AMD GPU."""
    device_files = ("/dev/kfd", "/dev/nvmap", "/dev/dxg")  # AMD, Jetson, WSL
    all_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1")
    return visible_gpu_count() == 0 and (all_hidden or not any(Path(file).exists() for file in device_files))


def gpu_memory() -> tuple[int, str] | None:
    """Return (bytes, name) of the GPU with the least memory; None if no memory is known.

    GPUs that CUDA_VISIBLE_DEVICES hides are included: NVML ignores this variable.
    """
    if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):  # NVML would report the whole GPU, not the slice
        return None
    library, count = _nvml(), ctypes.c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    gpus = [_memory_and_name(library, index) for index in range(count.value)]
    return min((gpu for gpu in gpus if gpu is not None), default=None)


@dataclass(frozen=True)
class DeviceUsage:
    """Current use of a GPU; None where the driver does not report a value."""

    uuid: str
    name: str
    memory_used: int | None
    """Bytes in use, by all processes."""
    memory_total: int | None
    """Bytes."""
    utilization: float | None
    """Share of the driver's last sampling period, at most a second, in which a kernel was running."""
    power: float | None
    """Watts."""


def device_usage(uuid: str) -> DeviceUsage | None:
    """Return the current use of the GPU with this UUID (`GPU-…`); None if NVML is not available or does not know it."""
    library, handle = _nvml(), ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    memory = _query(library.nvmlDeviceGetMemoryInfo, handle, _Memory())
    rates = _query(library.nvmlDeviceGetUtilizationRates, handle, _Utilization())
    milliwatts = _query(library.nvmlDeviceGetPowerUsage, handle, ctypes.c_uint())
    return DeviceUsage(
        uuid=uuid,
        name=_device_name(library, handle),
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        utilization=None if rates is None else rates.gpu / 100,
        power=None if milliwatts is None else milliwatts.value / 1000,
    )


def host_memory_available() -> int:
    """Return the available memory of this machine, or of its container, in bytes."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *(limit - used for limit, used in _cgroup_limits())]))


def host_memory_total() -> int:
    """Return the installed memory of this machine, or the limit of its container, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _cgroup_limits())])


class _CgroupFiles(NamedTuple):
    """File names of the memory controller."""

    limit: str
    used: str
    counters: str
    page_cache: str
    """Name in memory.stat of the part of `used` that the kernel frees first: files not used recently."""


_V2 = _CgroupFiles("memory.max", "memory.current", "memory.events", "inactive_file")
_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")


def _memory_cgroups() -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield the folders of this process's memory cgroup (version 2 or 1) and of the groups above it, the most specific
    first, with the names of their files. A folder may not exist: in a container, its path may be that of the host,
    while the root is the container's cgroup. The roots are included even if the process's groups are unknown."""
    memberships = _CGROUP_MEMBERSHIPS.read_text().splitlines() if _CGROUP_MEMBERSHIPS.exists() else []
    roots = [(_CGROUP_ROOT, _V2), (_CGROUP_ROOT / "memory", _V1)]
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (_CGROUP_ROOT / "memory", _V1) if controllers else (_CGROUP_ROOT, _V2)
        roots = [other for other in roots if other != (root, files)]
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, files
            if folder == root:
                break
    yield from roots


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return (limit, used memory) in bytes of every memory cgroup that limits this process."""
    limits = []
    for folder, files in _memory_cgroups():
        with contextlib.suppress(OSError):  # there is no such group, or it was removed meanwhile
            text = (folder / files.limit).read_text().strip()
            if text != "max":
                limits.append((int(text), _used_memory(folder, files)))
    return limits


def _used_memory(folder: Path, files: _CgroupFiles) -> int:
    """Return the memory in bytes that a cgroup uses, without reclaimable page cache, such as that of a dataset."""
    used, statistics = int((folder / files.used).read_text()), folder / "memory.stat"
    lines = statistics.read_text().splitlines() if statistics.exists() else []
    reclaimable = sum(int(line.split()[1]) for line in lines if line.startswith(f"{files.page_cache} "))
    return max(0, used - reclaimable)


@dataclass(frozen=True)
class MemoryState:
    """Host memory in bytes at one moment."""

    available: int
    total: int
    oom_kills: int | None
    """Number of processes in this process's cgroup that the kernel's OOM killer has killed so far; None: unknown."""
    host_oom_kills: int | None = None
    """Like `oom_kills`, for the whole machine: Ray may run in another cgroup."""


def memory_state() -> MemoryState:
    """Read the current state of this machine."""
    return MemoryState(
        host_memory_available(), host_memory_total(), oom_kills(cgroup_counters()), oom_kills([Path("/proc/vmstat")])
    )


def oom_kills(files: Sequence[Path]) -> int | None:
    """Return the `oom_kill` counter of the first of these files that has one; None: there is no counter."""
    for counters in files:
        if counters.is_file():
            lines = (line.split() for line in counters.read_text().splitlines())
            counts = [int(words[1]) for words in lines if words[0] == "oom_kill"]
            if counts:
                return counts[0]
    return None


def cgroup_counters() -> list[Path]:
    """Return files that may have the OOM kill counter of this process's memory cgroup, the most specific first.

    If the own folder is not visible, as in a container, the root is the container's group, and those in between belong
    to others.
    """
    counters: dict[_CgroupFiles, list[Path]] = {}
    for folder, files in _memory_cgroups():
        counters.setdefault(files, []).append(folder / files.counters)
    paths: list[Path] = []
    for own, *above in counters.values():
        paths += (own, *above) if own.parent.is_dir() else above[-1:]
    return paths


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


@functools.cache
def _nvml() -> Any:
    """Return NVML, loaded and initialized once per process; None if it is not available."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def _query(function: Any, handle: ctypes.c_void_p, value: Any) -> Any:
    """Call an NVML getter that writes to `value`, and return `value`; None if NVML reports an error."""
    return None if function(handle, ctypes.byref(value)) else value


def _device_name(library: Any, handle: ctypes.c_void_p) -> str:
    """Return the name of a GPU; "" if NVML reports an error."""
    name = ctypes.create_string_buffer(96)
    library.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    return name.value.decode(errors="replace")


def _memory_and_name(library: Any, index: int) -> tuple[int, str] | None:
    """Return (bytes, name) of a GPU; None if NVML does not report its memory (integrated GPUs share the host's)."""
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
        return None
    memory = _query(library.nvmlDeviceGetMemoryInfo, handle, _Memory())
    return None if memory is None else (int(memory.total), _device_name(library, handle))
