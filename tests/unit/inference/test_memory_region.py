"""Device memory that can be released and restored, with a simulated CUDA driver."""

from __future__ import annotations

import pytest
import torch

from verl.inference import memory

CHUNK = 1 << 30


class Driver:
    """Counts allocations; allocates at most `limit` chunks."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allocated = self.mapped = 0

    def call(self, name, *arguments):
        if name == "cuMemCreate":
            if self.allocated == self.limit:
                raise memory.DriverError("cuMemCreate failed: out of memory", 2)
            self.allocated += 1
        elif name == "cuMemRelease":
            self.allocated -= 1
        elif name == "cuMemMap":
            self.mapped += 1
        elif name == "cuMemUnmap":
            self.mapped -= 1
        elif name == "cuMemGetAllocationGranularity":
            arguments[0]._obj.value = 2 << 20
        elif name == "cuMemAddressReserve":
            arguments[0]._obj.value = 1 << 40


def test_memory_that_could_not_be_allocated_completely_is_freed(monkeypatch):
    driver, recorded = Driver(limit=2), []
    monkeypatch.setattr(memory, "driver_call", driver.call)
    monkeypatch.setattr(memory, "record_mapped_bytes", lambda index, size: recorded.append(size))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (CHUNK * 8, CHUNK * 8))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)  # would create the context of the device
    device = torch.device("cuda", 0)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="gpu_memory_utilization"):
        memory.VirtualRange(3 * CHUNK, device)
    assert (driver.allocated, driver.mapped, sum(recorded)) == (0, 0, 0)
    driver.limit = 3
    addresses = memory.VirtualRange(3 * CHUNK, device)
    assert (driver.allocated, driver.mapped, sum(recorded)) == (3, 3, 3 * CHUNK)
    addresses.unmap()
    driver.limit = 2
    with pytest.raises(torch.cuda.OutOfMemoryError, match="gpu_memory_utilization"):
        addresses.map()
    assert (driver.allocated, driver.mapped, sum(recorded)) == (0, 0, 0)
    driver.limit = 3
    addresses.map()
    assert (driver.allocated, driver.mapped, sum(recorded)) == (3, 3, 3 * CHUNK)
