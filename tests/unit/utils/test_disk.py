"""Large files go to disk while they are written and leave the memory that the system has for files."""

import ctypes
import mmap
import os

import pytest

from verl.planning.host import is_in_memory
from verl.utils import disk
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.utils.disk import UncachedFile

BLOCK = 2**20


def cached_blocks(path):
    """How many of a file's blocks the system has in memory. Reading to find out would begin to bring them there."""
    size = path.stat().st_size
    in_memory = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        begin = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(size), in_memory)
        del begin
    if failed:
        pytest.skip("this system does not say what is in memory")
    return sum(page & 1 for page in in_memory[:: BLOCK // mmap.PAGESIZE])


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be told")
def test_what_is_on_disk_is_no_longer_in_memory(tmp_path, monkeypatch):
    if is_in_memory(str(tmp_path)):
        pytest.skip("this file system is in memory")
    monkeypatch.setattr(disk, "PORTION_BYTES", BLOCK)
    monkeypatch.setattr(disk, "MAX_PENDING_BYTES", 4 * BLOCK)
    data = os.urandom(16 * BLOCK)
    (tmp_path / "plain").write_bytes(data)
    if cached_blocks(tmp_path / "plain") < 16:
        pytest.skip("this file system keeps nothing in memory")
    with UncachedFile(tmp_path / "steady") as file:
        done = 0
        while done < len(data):
            done += file.write(memoryview(data)[done:])
    assert cached_blocks(tmp_path / "steady") <= 4
    assert (tmp_path / "steady").read_bytes() == data


def test_parts_of_any_size_arrive_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "PORTION_BYTES", 1000)
    parts = [os.urandom(size) for size in (3, 5000, 0, 999, 1000, 20_000, 1)]
    with ChecksumRecorder(tmp_path).open("file") as stream:
        for part in parts:
            assert stream.write(part) == len(part)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
