"""Device memory that can be released and restored, with a simulated CUDA driver."""

from __future__ import annotations

import ctypes

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


def test_memory_that_could_not_be_allocated_completely_is_freed(monkeypatch):
    driver, recorded = Driver(limit=2), []
    monkeypatch.setattr(memory, "driver_call", driver.call)
    monkeypatch.setattr(memory, "record_mapped_bytes", lambda index, size: recorded.append(size))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (CHUNK * 8, CHUNK * 8))
    addresses = object.__new__(memory._VirtualRange)
    addresses._index, addresses._size, addresses._chunk = 0, 3 * CHUNK, CHUNK
    addresses._location = memory._Location(1, 0)
    addresses._properties = memory._AllocationProperties(type=1, location=addresses._location)
    addresses._address, addresses._handles = ctypes.c_uint64(1 << 40), []
    with pytest.raises(torch.cuda.OutOfMemoryError):
        addresses.map()
    assert (driver.allocated, driver.mapped, sum(recorded)) == (0, 0, 0)
    driver.limit = 3
    addresses.map()
    assert (driver.allocated, driver.mapped, sum(recorded)) == (3, 3, 3 * CHUNK)
