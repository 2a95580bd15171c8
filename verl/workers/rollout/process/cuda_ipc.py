"""DeviceMemory: a piece of a GPU's memory that another process opens by a handle.

Straight from the driver, not from torch's allocator, whose blocks cannot always be shared (expandable segments), and
whose handles cover memory of others.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from verl.inference.memory import driver_call
from verl.utils.device import record_mapped_bytes

__all__ = ["NO_IPC", "DeviceMemory"]

# Answers of the driver that mean that processes cannot share memory here: invalid value or device, map failed, no peer
# access, the operating system's (containers apart), invalid handle, not permitted, not supported.
NO_IPC = frozenset({1, 101, 205, 217, 304, 400, 800, 801})
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle of the driver API."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class DeviceMemory:
    """`size` bytes on a GPU; `torch.as_tensor` makes a tensor over them."""

    def __init__(self, address: int, size: int, device: torch.device, own: bool) -> None:
        self._address, self._size, self._device, self._own = address, size, device, own

    @classmethod
    def allocated(cls, size: int, device: torch.device) -> DeviceMemory:
        """New memory."""
        address = ctypes.c_uint64()
        with _current(device):
            if torch.cuda.mem_get_info(device)[0] < size:
                torch.cuda.empty_cache()  # what torch keeps for later is not free to anyone else
            driver_call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        record_mapped_bytes(_index(device), size)
        return cls(address.value, size, device, own=True)

    @classmethod
    def opened(cls, handle: bytes, size: int, device: torch.device) -> DeviceMemory:
        """Another process's memory, on a device that is `device` here."""
        address = ctypes.c_uint64()
        with _current(device):
            found = _IpcHandle.from_buffer_copy(handle)
            driver_call("cuIpcOpenMemHandle_v2", ctypes.byref(address), found, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return cls(address.value, size, device, own=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def exported(self) -> bytes:
        """What `opened` takes in another process."""
        handle = _IpcHandle()
        with _current(self._device):
            driver_call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._address))
        return bytes(handle.reserved)

    def close(self) -> None:
        """Give it back, or up."""
        with _current(self._device):
            torch.cuda.synchronize(self._device)
            if self._own:
                driver_call("cuMemFree_v2", ctypes.c_uint64(self._address))
                record_mapped_bytes(_index(self._device), -self._size)
            else:
                driver_call("cuIpcCloseMemHandle", ctypes.c_uint64(self._address))


class _current(torch.cuda.device):
    """The device's context is the calling thread's, which the driver's calls need."""

    def __enter__(self) -> None:
        super().__enter__()
        torch.cuda.synchronize()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
