"""Transport between a ProcessRollout and the process of its engine: messages over a socket, weights in a SharedBuffer.

The trainer's process writes weights into the buffer, and the engine's processes read them from there. The buffer is
anonymous shared memory on a CPU, or device memory shared by CUDA IPC on a GPU; the operating system frees both when the
processes end. It is used for many buckets: messages contain only its handle and the positions of tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.inference.memory import DriverError, driver_call
from verl.single_controller.base.worker_group import Failure
from verl.types.request import Output
from verl.types.weights import Bucket, RequestedRows, TensorSlice
from verl.utils.device import record_mapped_bytes
from verl.utils.exceptions import RemoteTraceback
from verl.workers.rollout.weights import BucketPiece, bucket_layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSpec:
    """The engine to create: the argument of `build`, the first method call."""

    class_path: str
    """The engine's class, `module:Class`."""
    model_path: str
    model_config: ModelConfig
    config: RolloutConfig
    device: str
    threads: int
    """Number of torch threads, as in the calling process: floating-point sums depend on it."""


@dataclass(frozen=True)
class EngineInfo:
    """Properties of the engine: the reply to `build`."""

    version: int
    weight_dtype: torch.dtype
    eos_token_ids: frozenset[int]
    pad_token_id: int
    requested_rows: RequestedRows | None


@dataclass(frozen=True)
class MethodCall:
    """A call of a method of the engine or its host."""

    number: int | None
    """Number that the reply will have; None: no reply is sent."""
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class MethodReply:
    """The result of a call, or its exception."""

    number: int
    value: Any
    failure: Failure | None = None


@dataclass(frozen=True)
class FinishedRequests:
    """Outputs or exceptions of finished requests, with the numbers with which they were submitted."""

    outputs: list[tuple[int, Output | Failure]]


@dataclass(frozen=True)
class ProgressReport:
    """Sent when the engine's process makes progress, so that a start or step is not taken for a hang."""

    step: str | None = None
    """The current step of the engine's start; None: unknown, or the engine has started."""


def remote_exception(failure: Failure) -> Exception:
    """Return the exception that was raised in the other process, with the traceback from there as its cause."""
    exception = failure.exception()
    error = exception if isinstance(exception, Exception) else RuntimeError(failure.summary)
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error


_LENGTH_PREFIX = struct.Struct("<Q")


class MessageChannel:
    """One end of a private socket pair between two processes of this program. A message is sent as the length of its
    pickle, and the pickle. Any thread may send; only one thread may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._send_lock = threading.Lock()
        self._reader = end.makefile("rb")

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the other end is closed."""
        data = pickle.dumps(message, protocol=5)
        with self._send_lock:
            self._socket.sendall(_LENGTH_PREFIX.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for the next message and return it. Raises EOFError or OSError if the other end is closed."""
        return pickle.loads(self._read(*_LENGTH_PREFIX.unpack(self._read(_LENGTH_PREFIX.size))))

    def close(self) -> None:
        """Close the connection; `receive` raises at both ends."""
        with contextlib.suppress(OSError):  # the other end is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = self._reader.read(size)
        if len(data) < size:
            raise EOFError
        return data


@dataclass(frozen=True)
class BufferHandle:
    """Identifies a buffer in other processes of the machine. Small and picklable."""

    location: str | bytes
    """A path for a buffer in host memory, an IPC handle of the CUDA driver for a buffer in device memory."""
    size: int


@dataclass(frozen=True)
class BucketHandle:
    """Identifies a bucket in a buffer. Small and picklable."""

    buffer: BufferHandle
    pieces: tuple[BucketPiece, ...]


class SharedBucket(dict["str | TensorSlice", torch.Tensor]):
    """A bucket in a shared buffer: views of its tensors, and the handle for other processes."""

    def __init__(self, tensors: Bucket, handle: BucketHandle) -> None:
        super().__init__(tensors)
        self.handle = handle


class SharedBuffer:
    """Memory shared by processes of one machine: the uint8 tensor `flat`. Its creator must not close it while others
    read.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        device = torch.device(device)
        self._memory: _DeviceMemory | None = None
        if device.type == "cuda":
            self._memory = _DeviceMemory.allocate(size, device)
            self.flat = torch.as_tensor(self._memory, device=device)
            self.handle = BufferHandle(self._memory.export_handle(), size)
        else:
            file = os.memfd_create("verl-weights")
            try:
                # Raises if there is too little memory; otherwise a later write would kill the process.
                os.posix_fallocate(file, 0, size)
                self._map(file, size)
                self._descriptor = file
            except OSError as error:
                os.close(file)
                raise OSError(
                    f"weights: cannot allocate {size / 2**30:.1f} GB of host memory to share with the engine"
                    f" ({error.strerror}). Lower update_weights_bucket_megabytes."
                ) from error
            self.handle = BufferHandle(f"/proc/{os.getpid()}/fd/{file}", size)

    @classmethod
    def attach(cls, handle: BufferHandle) -> SharedBuffer:
        """Open a buffer of another process. If it is on a GPU, that GPU must be device 0 of this process."""
        buffer = cls.__new__(cls)
        buffer.handle, buffer._memory = handle, None
        if isinstance(handle.location, bytes):
            device = torch.device("cuda", 0)
            buffer._memory = _DeviceMemory.open(handle.location, handle.size, device)
            buffer.flat = torch.as_tensor(buffer._memory, device=device)
        else:
            buffer._descriptor = os.open(handle.location, os.O_RDWR)
            buffer._map(buffer._descriptor, handle.size)
        return buffer

    def put(self, bucket: Bucket, start: int = 0) -> BucketHandle:
        """Copy tensors into the buffer, from byte `start` on. They are visible to all processes when this returns."""
        pieces = tuple(bucket_layout(bucket, start))
        views = [piece.view(self.flat) for piece in pieces]
        if views:
            torch._foreach_copy_(views, list(bucket.values()))
        if self._memory is not None:
            torch.cuda.current_stream(self.flat.device).synchronize()
        return BucketHandle(self.handle, pieces)

    def bucket(self, handle: BucketHandle) -> SharedBucket:
        """Return the tensors of a bucket as views of this buffer."""
        return SharedBucket({piece.key: piece.view(self.flat) for piece in handle.pieces}, handle)

    def close(self) -> None:
        """Close the buffer; its creator frees device memory. No view may be used afterwards."""
        self.flat = torch.empty(0, dtype=torch.uint8)
        if self._memory is not None:
            self._memory.close()
        else:
            os.close(self._descriptor)

    def _map(self, file: int, size: int) -> None:
        # The mapping lives as long as the tensor and its views.
        self.flat = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def open_shared_buffer(size: int, device: torch.device, open_remote: Callable[[BufferHandle], object]) -> SharedBuffer:
    """Create a buffer on `device` if another process can open it there, otherwise in host memory.

    `open_remote` opens a buffer in the other process, and raises DriverError if that is impossible.
    """
    if device.type == "cuda":
        buffer: SharedBuffer | None = None
        try:
            buffer = SharedBuffer(size, device)
            open_remote(buffer.handle)
            return buffer
        except Exception as error:
            if buffer is not None:
                buffer.close()
            if not isinstance(error, DriverError):
                raise
            if error.code not in _NO_IPC:
                raise RuntimeError(
                    f"weights: {size / 2**30:.1f} GB of device memory for the weight sync could not be shared with the"
                    f" engine ({error}). Lower gpu_memory_utilization, or update_weights_bucket_megabytes."
                ) from error
            logger.warning("rollout: no CUDA IPC (%s): weights are copied to the engine through host memory.", error)
    return SharedBuffer(size, "cpu")


class BufferReader:
    """Opens buffers in the reading process, and keeps the last one open."""

    def __init__(self) -> None:
        self._buffer: SharedBuffer | None = None

    def bucket(self, handle: BucketHandle) -> SharedBucket:
        """Return the tensors of a bucket as views; its buffer is opened if necessary."""
        return self.open(handle.buffer).bucket(handle)

    def open(self, handle: BufferHandle) -> SharedBuffer:
        """Return the buffer with this handle. If it is not the last one, it is opened, and the last one is closed."""
        if self._buffer is None or self._buffer.handle != handle:
            self.close()
            self._buffer = SharedBuffer.attach(handle)
        return self._buffer

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


# ---------------------------------------------------------------- CUDA IPC

# Error codes of the driver (CUresult) that mean that processes cannot share device memory on this machine: invalid
# value or device, map failed, no peer access, operating system (separate containers), invalid handle, not permitted,
# not supported.
_NO_IPC = frozenset({1, 101, 205, 217, 304, 400, 800, 801})
# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle of the driver API."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _DeviceMemory:
    """Device memory that other processes can open; `torch.as_tensor` creates a tensor that uses it.

    It is allocated by the driver, not by torch's allocator, whose blocks cannot always be shared (expandable
    segments), and whose handles give access to other tensors too.
    """

    def __init__(self, address: int, size: int, device: torch.device, is_owner: bool) -> None:
        self._address, self._size, self._device, self._is_owner = address, size, device, is_owner

    @classmethod
    def allocate(cls, size: int, device: torch.device) -> _DeviceMemory:
        address = ctypes.c_uint64()
        with _DeviceContext(device):
            if torch.cuda.mem_get_info(device)[0] < size:
                torch.cuda.empty_cache()  # the driver cannot use memory that torch's allocator keeps
            driver_call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        record_mapped_bytes(_device_index(device), size)
        return cls(address.value, size, device, is_owner=True)

    @classmethod
    def open(cls, handle: bytes, size: int, device: torch.device) -> _DeviceMemory:
        """Open memory of another process. `device`: the device of the memory, as numbered in this process."""
        address = ctypes.c_uint64()
        with _DeviceContext(device):
            ipc_handle = _IpcHandle.from_buffer_copy(handle)
            driver_call("cuIpcOpenMemHandle_v2", ctypes.byref(address), ipc_handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return cls(address.value, size, device, is_owner=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def export_handle(self) -> bytes:
        """Return the handle with which another process can `open` this memory."""
        handle = _IpcHandle()
        with _DeviceContext(self._device):
            driver_call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._address))
        return bytes(handle.reserved)

    def close(self) -> None:
        """Free the memory; if another process owns it, only end the access to it."""
        with _DeviceContext(self._device):
            torch.cuda.synchronize(self._device)
            if self._is_owner:
                driver_call("cuMemFree_v2", ctypes.c_uint64(self._address))
                record_mapped_bytes(_device_index(self._device), -self._size)
            else:
                driver_call("cuIpcCloseMemHandle", ctypes.c_uint64(self._address))


class _DeviceContext(torch.cuda.device):
    """Makes the device's context current in the calling thread, which driver calls need."""

    def __enter__(self) -> None:
        super().__enter__()
        torch.cuda.synchronize()  # creates the context, which torch does lazily


def _device_index(device: torch.device) -> int:
    """Return the index of a CUDA device; without an index it is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index
