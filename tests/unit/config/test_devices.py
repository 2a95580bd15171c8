"""Memory of GPUs as NVML reports it. NVML needs a driver, so a library with the same functions answers here."""

from __future__ import annotations

import ctypes

import pytest

from verl.config import devices

NOT_SUPPORTED = 3


class Library:
    """GPUs with these bytes of memory; None: NVML does not report it."""

    def __init__(self, totals: list[int | None]) -> None:
        self._totals = totals

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count._obj.value = len(self._totals)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory) -> int:
        total = self._totals[handle.value - 1]
        if total is None:
            return NOT_SUPPORTED
        memory._obj.total = total
        return 0

    def nvmlDeviceGetName(self, handle, name: ctypes.Array, size) -> int:
        name.value = b"GPU %d" % handle.value
        return 0


@pytest.mark.parametrize(
    ("files", "limited"),
    [
        ({"memory.max": "3000", "memory.current": "1000"}, True),
        ({"memory.max": "max", "memory.current": "1000", "memory/memory.limit_in_bytes": "9"}, False),
        ({"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "1000"}, True),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "1000"}, False),
        ({}, False),
    ],
)
def test_host_memory_is_limited_by_either_version_of_cgroups(tmp_path, monkeypatch, files, limited):
    monkeypatch.setattr(devices, "_CGROUP_ROOT", tmp_path)
    (tmp_path / "memory").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content + "\n")
    assert (devices.host_memory_available() == 2000) is limited
    assert (devices.host_memory_total() == 3000) is limited


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([80 << 30, 24 << 30], (24 << 30, "GPU 2")),
        ([None], None),
        ([None, 24 << 30], (24 << 30, "GPU 2")),
        ([], None),
    ],
)
def test_memory_that_nvml_does_not_report_is_unknown_and_not_0(monkeypatch, totals, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_nvml", lambda: Library(totals))
    assert devices.gpu_memory() == expected
