"""Region: device memory that can be released and restored at the same address."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from verl.utils.device import record_mapped_bytes
from verl.utils.exceptions import PicklableError

__all__ = ["DriverError", "Region", "driver_call"]


class Region:
    """`size` bytes on a device.

    `bytes`: uint8 tensor [size] of this memory, not to be used while it is released. `held`: whether it is allocated.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.size = size
        self.held = True
        self._range: VirtualRange | None = None
        if self.device.type == "cuda":
            self._range = VirtualRange(size, self.device)
            self.bytes = torch.as_tensor(self._range, device=self.device)
        else:
            self.bytes = torch.empty(size, dtype=torch.uint8, device=self.device)

    def release(self) -> None:
        """Free the memory; its content is lost."""
        if self.held:
            self.held = False
            if self._range is not None:
                torch.cuda.synchronize(self.device)
                self._range.unmap()
            else:
                self.bytes.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate the memory again at the same address, with undefined content."""
        if not self.held:
            if self._range is not None:
                self._range.map()
            else:
                self.bytes.untyped_storage().resize_(self.size)
            self.held = True

    def close(self) -> None:
        """Free device memory and its addresses: no view may be used afterwards. Host memory is freed with `bytes`."""
        if self._range is not None:
            self.release()
            self._range.free()
            self._range = None


class _Location(ctypes.Structure):
    """CUmemLocation of the driver API."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("gpu_direct", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


# CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


class VirtualRange:
    """Reserved addresses with memory mapped in chunks (the CUDA driver's virtual memory management)."""

    # Bytes per allocation: one of many GB can fail where chunks of this size do not.
    _CHUNK = 1 << 30

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.empty(1, device=f"cuda:{index}")  # creates the device's context, which the driver calls below need
        self._index = index
        self._location = _Location(_DEVICE, index)
        self._properties = _AllocationProperties(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        driver_call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self._size = _round_up(max(size, 1), granularity.value)
        self._chunk = _round_up(self._CHUNK, granularity.value)
        self._address = ctypes.c_uint64()
        driver_call(
            "cuMemAddressReserve",
            ctypes.byref(self._address), ctypes.c_size_t(self._size), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self._handles: list[tuple[int, int, ctypes.c_uint64]] = []
        """(offset, size, allocation) of every mapped chunk."""
        self._requested_size = size
        self.map()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._requested_size,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def map(self) -> None:
        """Allocate memory for all addresses. If that fails, none stays allocated."""
        if torch.cuda.mem_get_info(self._index)[0] < self._size:
            torch.cuda.empty_cache()  # memory cached by torch is not free for the driver
        try:
            for start in range(0, self._size, self._chunk):
                self._map_chunk(start, min(self._chunk, self._size - start))
            access = _Access(self._location, _READ_WRITE)
            driver_call(
                "cuMemSetAccess", self._address, ctypes.c_size_t(self._size), ctypes.byref(access), ctypes.c_size_t(1)
            )
        except RuntimeError as error:
            free, total = torch.cuda.mem_get_info(self._index)
            self.unmap()
            raise torch.cuda.OutOfMemoryError(
                f"rollout: {self._size / 2**30:.1f} GB of device memory could not be allocated ({error};"
                f" {free / 2**30:.1f} of {total / 2**30:.1f} GB are free). Lower"
                " gpu_memory_utilization, or offload the trainer."
            ) from error

    def _map_chunk(self, start: int, size: int) -> None:
        handle = ctypes.c_uint64()
        driver_call(
            "cuMemCreate",
            ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._properties), ctypes.c_uint64(0),
        )  # fmt: skip
        address = ctypes.c_uint64(self._address.value + start)
        try:
            driver_call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        except DriverError:
            driver_call("cuMemRelease", handle)
            raise
        self._handles.append((start, size, handle))
        record_mapped_bytes(self._index, size)

    def unmap(self) -> None:
        """Free the memory; the addresses stay reserved."""
        for start, size, handle in self._handles:
            driver_call("cuMemUnmap", ctypes.c_uint64(self._address.value + start), ctypes.c_size_t(size))
            driver_call("cuMemRelease", handle)
            record_mapped_bytes(self._index, -size)
        self._handles = []

    def free(self) -> None:
        """Free the addresses, after `unmap`."""
        driver_call("cuMemAddressFree", self._address, ctypes.c_size_t(self._size))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class DriverError(PicklableError, RuntimeError):
    """An error of the CUDA driver; `code` is its CUresult."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def driver_call(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver. Raises DriverError if it fails."""
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name} failed: {(text.value or b'unknown error').decode()}", code)
