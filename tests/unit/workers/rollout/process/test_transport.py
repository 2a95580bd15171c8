"""Weights in memory that two processes share: what one puts there the other sees, and nothing is left behind."""

import pickle
import resource
import subprocess
import sys

import pytest
import torch

from verl.inference.memory import DriverError
from verl.types.request import EngineDiedError
from verl.types.weights import TensorSlice, TensorSpec
from verl.workers.rollout.process import transport
from verl.workers.rollout.process.transport import BufferHandle, BufferReader, SharedBuffer
from verl.workers.rollout.weights import TensorAssembler

READER = """
import pickle, sys
from verl.workers.rollout.process.transport import BufferReader
bucket = BufferReader().bucket(pickle.load(sys.stdin.buffer))
pickle.dump({key: tensor.clone() for key, tensor in bucket.items()}, sys.stdout.buffer)
"""


def test_memory_that_cannot_be_had_is_named_with_the_key():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"update_weights_bucket_megabytes"):
            SharedBuffer(1 << 30, "cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_another_process_sees_the_tensors_bit_for_bit():
    bucket = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        TensorSlice("b", 4, 6): torch.randn(2, 7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    buffer = SharedBuffer(4096, "cpu")
    handle = buffer.put(bucket, start=1001)
    done = subprocess.run([sys.executable, "-c", READER], input=pickle.dumps(handle), capture_output=True, check=True)
    found = pickle.loads(done.stdout)
    buffer.close()
    assert found.keys() == bucket.keys()
    for key, tensor in bucket.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def test_a_reader_follows_to_a_larger_buffer_and_keeps_no_other():
    small, reader = SharedBuffer(64, "cpu"), BufferReader()
    view = reader.bucket(small.put({"a": torch.ones(4)}))["a"]
    small.put({"a": torch.full((4,), 2.0)})
    assert view.tolist() == [2.0] * 4  # the same memory, not a copy
    large = SharedBuffer(1 << 20, "cpu")
    assert torch.equal(reader.bucket(large.put({"b": torch.arange(9)}))["b"], torch.arange(9))
    for buffer in (small, large, reader):
        buffer.close()


def test_rows_of_several_buckets_become_whole_tensors():
    whole, part = torch.arange(12.0).view(6, 2), TensorAssembler({"w": TensorSpec((6, 2), torch.float32)})
    assert part.add({TensorSlice("w", 4, 6): whole[4:]}) == {}
    found = part.add({TensorSlice("w", 0, 4): whole[:4], "x": torch.ones(1)})
    assert torch.equal(found["w"], whole)
    assert torch.equal(found["x"], torch.ones(1))


class OnDevice:
    """A buffer on a GPU, as far as it goes without one."""

    closed = 0

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.device, self.handle = torch.device(device), BufferHandle(b"", size)

    def close(self) -> None:
        OnDevice.closed += 1


def test_only_what_means_that_there_is_no_ipc_sends_weights_through_the_host(monkeypatch):
    monkeypatch.setattr(transport, "SharedBuffer", OnDevice)
    cuda = torch.device("cuda", 1)

    def there(error: Exception | None) -> OnDevice:
        def open_there(handle: BufferHandle) -> None:
            if error is not None:
                raise pickle.loads(pickle.dumps(error))  # it comes from another process

        return transport.open_shared_buffer(64, cuda, open_there)

    assert there(None).device == cuda
    assert there(DriverError("cuIpcOpenMemHandle_v2 failed: operation not supported", 801)).device.type == "cpu"
    with pytest.raises(RuntimeError, match=r"gpu_memory_utilization"):
        there(DriverError("cuIpcOpenMemHandle_v2 failed: out of memory", 2))
    with pytest.raises(EngineDiedError):
        there(EngineDiedError("it is gone"))
    assert OnDevice.closed == 3
