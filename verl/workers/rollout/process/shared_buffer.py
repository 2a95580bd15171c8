"""SharedBuffer: memory that a trainer's process writes weights into and an engine's processes read them from.

Anonymous shared memory on a CPU, device memory by CUDA IPC on a GPU: nothing is left behind, whoever dies. It is made
once and used for every bucket; only its handle and the places of the tensors in it travel.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl.inference.memory import DriverError
from verl.types.weights import Bucket, TensorSlice
from verl.workers.rollout.bucket_layout import BucketPiece, bucket_layout
from verl.workers.rollout.process.cuda_ipc import NO_IPC, DeviceMemory

__all__ = ["BucketHandle", "BufferHandle", "BufferReader", "SharedBucket", "SharedBuffer", "buffer_of_both"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BufferHandle:
    """What another process of the same machine finds a buffer by. Small, and picklable."""

    place: str | bytes
    """A path on a CPU, on a GPU what the driver exports."""
    size: int


@dataclass(frozen=True)
class BucketHandle:
    """A bucket that lies in a buffer. Small, and picklable."""

    buffer: BufferHandle
    pieces: tuple[BucketPiece, ...]


class SharedBucket(dict["str | TensorSlice", torch.Tensor]):
    """A bucket in a shared buffer: views, and the handle by which other processes see the same bytes."""

    def __init__(self, tensors: Bucket, handle: BucketHandle) -> None:
        super().__init__(tensors)
        self.handle = handle


class SharedBuffer:
    """`flat`, a uint8 tensor that processes of one machine share. Who makes it keeps it for as long as others read."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        device = torch.device(device)
        self._memory: DeviceMemory | None = None
        if device.type == "cuda":
            self._memory = DeviceMemory.allocated(size, device)
            self.flat = torch.as_tensor(self._memory, device=device)
            self.handle = BufferHandle(self._memory.exported(), size)
        else:
            file = os.memfd_create("verl-weights")
            try:
                os.posix_fallocate(file, 0, size)  # too little memory is an error here, not a signal at a write
                self._map(file, size)
                self._file = file
            except OSError as error:
                os.close(file)
                raise OSError(
                    f"weights: no {size / 2**30:.1f} GB of host memory to share with the engine ({error.strerror})."
                    " Lower update_weights_bucket_megabytes."
                ) from error
            self.handle = BufferHandle(f"/proc/{os.getpid()}/fd/{file}", size)

    @classmethod
    def attach(cls, handle: BufferHandle) -> SharedBuffer:
        """The same memory in another process; on a GPU, one that sees the maker's device as its first."""
        found = cls.__new__(cls)
        found.handle, found._memory = handle, None
        if isinstance(handle.place, bytes):
            device = torch.device("cuda", 0)
            found._memory = DeviceMemory.opened(handle.place, handle.size, device)
            found.flat = torch.as_tensor(found._memory, device=device)
        else:
            found._file = os.open(handle.place, os.O_RDWR)
            found._map(found._file, handle.size)
        return found

    def put(self, bucket: Bucket, start: int = 0) -> BucketHandle:
        """Copy tensors into it, from byte `start` on; when this returns they are there for everybody."""
        pieces = tuple(bucket_layout(bucket, start))
        views = [piece.view(self.flat) for piece in pieces]
        if views:
            torch._foreach_copy_(views, list(bucket.values()))
        if self._memory is not None:
            torch.cuda.current_stream(self.flat.device).synchronize()
        return BucketHandle(self.handle, pieces)

    def bucket(self, handle: BucketHandle) -> SharedBucket:
        """Views of a bucket that was put here."""
        return SharedBucket({piece.key: piece.view(self.flat) for piece in handle.pieces}, handle)

    def close(self) -> None:
        """Let go of the memory. No view may be used afterwards."""
        self.flat = torch.empty(0, dtype=torch.uint8)
        if self._memory is not None:
            self._memory.close()
        else:
            os.close(self._file)

    def _map(self, file: int, size: int) -> None:
        # The tensor keeps the mapping, which ends with its last view.
        self.flat = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def buffer_of_both(size: int, device: torch.device, open_there: Callable[[BufferHandle], object]) -> SharedBuffer:
    """One that another process, which `open_there` asks, has opened: on `device` if it can have memory of it, else on
    the host."""
    if device.type == "cuda":
        buffer: SharedBuffer | None = None
        try:
            buffer = SharedBuffer(size, device)
            open_there(buffer.handle)
            return buffer
        except Exception as error:
            if buffer is not None:
                buffer.close()
            if not isinstance(error, DriverError):
                raise
            if error.code not in NO_IPC:
                raise RuntimeError(
                    f"weights: the {size / 2**30:.1f} GB of device memory through which they reach the engine could not"
                    f" be shared ({error}). Lower gpu_memory_utilization, or update_weights_bucket_megabytes."
                ) from error
            logger.warning("rollout: no CUDA IPC (%s): weights reach the engine through host memory.", error)
    return SharedBuffer(size, "cpu")


class BufferReader:
    """An engine's side: buckets by handle. A buffer is opened once, and given up when another takes its place."""

    def __init__(self) -> None:
        self._buffer: SharedBuffer | None = None

    def bucket(self, handle: BucketHandle) -> SharedBucket:
        """Views of what lies in the buffer now."""
        return self.open(handle.buffer).bucket(handle)

    def open(self, handle: BufferHandle) -> SharedBuffer:
        """The buffer, in the place of the one before."""
        if self._buffer is None or self._buffer.handle != handle:
            self.close()
            self._buffer = SharedBuffer.attach(handle)
        return self._buffer

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
