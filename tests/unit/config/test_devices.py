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


V1, V2 = "9:cpu:/\n4:memory:{0}\n0::{0}\n", "0::{0}\n"


@pytest.mark.parametrize("path", ["/", "/pod/container"])
@pytest.mark.parametrize(
    ("memberships", "group", "files", "limited"),
    [
        (V2, ".", {"memory.max": "3000", "memory.current": "1000"}, True),
        (V2, "pod", {"memory.max": "3000", "memory.current": "1000"}, True),
        (V2, "pod/container", {"memory.max": "3000", "memory.current": "1000"}, True),
        (V2, "pod/other", {"memory.max": "3000", "memory.current": "1000"}, False),
        (V2, ".", {"memory.max": "max", "memory.current": "1000"}, False),
        (V1, "memory", {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "1000"}, True),
        (V1, "memory/pod", {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "1000"}, True),
        (V1, "memory/pod/container", {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "1000"}, True),
        (V1, "memory/pod/other", {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "1000"}, False),
        (V1, "memory", {"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "1000"}, False),
        (V1, ".", {}, False),
        (None, ".", {"memory.max": "3000", "memory.current": "1000"}, True),
        ("", ".", {"memory.max": "3000", "memory.current": "1000"}, True),
        ("9:cpu:/\n", "memory", {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "1000"}, True),
    ],
)
def test_host_memory_is_limited_by_the_cgroup_and_those_above_it(
    tmp_path, monkeypatch, path, memberships, group, files, limited
):
    root, own = tmp_path / "root", tmp_path / "cgroup"
    if memberships is not None:
        own.write_text(memberships.format(path))
    (root / group).mkdir(parents=True)
    for name, content in files.items():
        (root / group / name).write_text(content + "\n")
    monkeypatch.setattr(devices, "_CGROUP_ROOT", root)
    monkeypatch.setattr(devices, "_CGROUP_MEMBERSHIPS", own)
    limited = limited and (path != "/" or group in (".", "memory"))
    assert (devices.host_memory_available() == 2000) is limited
    assert (devices.host_memory_total() == 3000) is limited


def test_the_strictest_cgroup_counts(tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text("0::/pod/container\n")
    for folder, limit, used in (("pod", 5000, 4500), ("pod/container", 3000, 1000)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(devices, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(devices, "_CGROUP_MEMBERSHIPS", tmp_path / "cgroup")
    assert (devices.host_memory_available(), devices.host_memory_total()) == (500, 3000)


@pytest.mark.parametrize(
    ("memberships", "counters"), [("0::{}\n", "memory.events"), ("3:memory:{}\n", "memory/memory.oom_control")]
)
def test_out_of_memory_kills_are_those_of_the_own_memory_group(tmp_path, monkeypatch, memberships, counters):
    """The root is the container's group if the own folder is not visible; otherwise the groups above it may have the
    memory controller."""
    root, name = (tmp_path / counters).parent, (tmp_path / counters).name
    (tmp_path / "cgroup").write_text(memberships.format("/slice/job"))
    monkeypatch.setattr(devices, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(devices, "_CGROUP_MEMBERSHIPS", tmp_path / "cgroup")
    found = []
    for folder, kills in (("slice", 7), (".", 5), ("slice/job", None), ("slice/job", 3)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        if kills is not None:
            (root / folder / name).write_text(f"oom_kill {kills}\n")
        found.append(devices.oom_kills(devices.cgroup_counters()))
    assert found == [None, 5, 7, 3]


@pytest.mark.parametrize(
    ("used", "statistics", "available"),
    [
        (2900, "anon 400\nfile 2500\ninactive_file 2500\nactive_file 0\n", 2600),
        (2900, "inactive_file 2950\n", 3000),  # the files are not read at the same time
        (2900, None, 100),
        (3100, "inactive_file 0\n", 0),
        (None, "inactive_file 0\n", None),
    ],
)
@pytest.mark.parametrize(
    ("memberships", "folder", "limit_file", "used_file", "prefix"),
    [
        ("0::/\n", ".", "memory.max", "memory.current", ""),
        # Without the prefix, a name counts the group without those below it.
        ("4:memory:/\n", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 9\ntotal_"),
    ],
)
def test_page_cache_of_a_cgroup_is_available_and_a_group_that_disappears_has_no_limit(
    tmp_path, monkeypatch, memberships, folder, limit_file, used_file, prefix, used, statistics, available
):
    own, group = tmp_path / "cgroup", tmp_path / "root" / folder
    own.write_text(memberships)
    group.mkdir(parents=True)
    (group / limit_file).write_text("3000\n")
    if used is not None:
        (group / used_file).write_text(f"{used}\n")
    if statistics is not None:
        (group / "memory.stat").write_text(statistics.replace("inactive_file", prefix + "inactive_file"))
    monkeypatch.setattr(devices, "_CGROUP_ROOT", tmp_path / "root")
    monkeypatch.setattr(devices, "_CGROUP_MEMBERSHIPS", own)
    assert min(devices.host_memory_available(), 1 << 20) == (1 << 20 if available is None else available)


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
