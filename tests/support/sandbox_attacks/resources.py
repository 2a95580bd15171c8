"""Measure the peak of memory (kernel memory included) and of disk space that programs reach against their limits."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from tests.support.sandbox_attacks.resource_attacks import PRELUDE, RESOURCE_ATTACKS, ResourceAttack
from verl.sandbox import Limits, Sandbox, linux

LIMITS = Limits(wall_s=6.0, memory_mb=256, file_mb=64, processes=64, output_bytes=1 << 16)
_SAMPLE_SECONDS = 0.002
_IDLE_SECONDS = 0.3
_TEMPORARY_MB = 8192
_OWN_CGROUP = "/sys/fs/cgroup/memory/verl-measure-"  # cgroup v1; without it, the whole machine is measured


class Peak:
    """The increase of a figure during a context, sampled every 2 ms in a thread. In MB."""

    def __init__(self, figure: Callable[[], int]) -> None:
        self._figure = figure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._start = self._highest = figure()

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def megabytes(self) -> int:
        return max(0, self._highest - self._start) >> 20

    def _sample(self) -> None:
        while not self._stop.is_set():
            self._highest = max(self._highest, self._figure())
            time.sleep(_SAMPLE_SECONDS)


def isolate_measurement() -> None:
    """As root: give this process a memory cgroup and a file system for temporary files, for figures without noise."""
    for old in glob.glob(_OWN_CGROUP + "*"):
        with contextlib.suppress(OSError):  # the cgroup of a process that still runs
            os.rmdir(old)
    with contextlib.suppress(OSError):
        os.mkdir(f"{_OWN_CGROUP}{os.getpid()}")
        with open(f"{_OWN_CGROUP}{os.getpid()}/cgroup.procs", "w", encoding="ascii") as file:
            file.write("0")
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC)  # shared memory that programs leave ends with this process
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    options = f"mode=1777,size={_TEMPORARY_MB}m"
    for folder in (tempfile.gettempdir(), "/dev/shm"):
        linux.mount("measure", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)


def measure_attacks(cgroup: bool, attacks: Sequence[ResourceAttack] = RESOURCE_ATTACKS) -> list[dict[str, Any]]:
    """Run the attacks; return a row per attack with limit and peak in MB. `cgroup`: the option of `Sandbox`."""
    with Sandbox(require="none", limits=LIMITS, warm=1, cgroup=cgroup) as sandbox:
        sandbox.run("")
        return [_measure(sandbox, attack) for attack in attacks]


def memory_figure(cgroup: str | None) -> Callable[[], int]:
    """Bytes in use without memory that the kernel can reclaim immediately (page cache and reclaimable slabs)."""

    def of_machine() -> int:
        info = _table("/proc/meminfo", 1024)
        cache = info["Cached:"] - info["Shmem:"] + info["Buffers:"] + info["SReclaimable:"]
        return info["MemTotal:"] - info["MemFree:"] - cache

    def of_cgroup() -> int:
        stat = _table(f"{cgroup}/memory.stat", 1)
        with open(f"{cgroup}/memory.usage_in_bytes", encoding="ascii") as file:
            return int(file.read()) - stat["total_active_file"] - stat["total_inactive_file"]

    return of_machine if cgroup is None else of_cgroup


def _measure(sandbox: Sandbox, attack: ResourceAttack) -> dict[str, Any]:
    time.sleep(_IDLE_SECONDS)
    code = attack.code if attack.language != "python" else PRELUDE + attack.code
    in_memory = attack.resource == "memory" or sandbox.isolation.namespaces  # with namespaces, files are in a tmpfs
    figure = memory_figure(_own_cgroup()) if in_memory else _disk_figure()
    with Peak(figure if attack.charged else _kernel_figure) as peak:
        result = sandbox.run(code, attack.language)
    limit = LIMITS.memory_mb if attack.resource == "memory" else LIMITS.file_mb
    return {
        "attack": attack.name,
        "resource": attack.resource,
        "limit": limit,
        "reached": peak.megabytes,
        "status": result.status,
    }


def _own_cgroup() -> str | None:
    folder = f"{_OWN_CGROUP}{os.getpid()}"
    return folder if os.path.exists(folder) else None


def _kernel_figure() -> int:
    """Bytes that the kernel of the machine has allocated for itself and cannot drop."""
    return _table("/proc/meminfo", 1024)["SUnreclaim:"]


def _disk_figure() -> Callable[[], int]:
    def used() -> int:
        disk = os.statvfs(tempfile.gettempdir())
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize

    return used


def _table(path: str, unit: int) -> dict[str, int]:
    with open(path, encoding="ascii") as file:
        return {name: int(value) * unit for name, value, *_ in (line.split() for line in file)}
