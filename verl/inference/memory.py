"""Device memory of the engine: regions that can be released and restored, and the KV cache."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from verl.config.devices import host_memory_available
from verl.inference.attention import LayerKVCache
from verl.utils.device import copy_to_device, record_mapped_bytes
from verl.utils.exceptions import PicklableError

if TYPE_CHECKING:
    from verl.inference.models import InferenceModel

__all__ = [
    "DriverError",
    "KVCache",
    "Region",
    "bytes_per_block",
    "bytes_per_token",
    "choose_num_blocks",
    "device_kv_bytes",
    "driver_call",
    "host_kv_bytes",
    "logit_bytes",
    "step_bytes",
]


class Region:
    """`size` bytes on a device; `bytes` is the uint8 tensor over them."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.size = size
        self.held = True
        self._range: _VirtualRange | None = None
        if self.device.type == "cuda":
            self._range = _VirtualRange(size, self.device)
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
        """Free memory and addresses on a device. No view may be used afterwards."""
        if self._range is not None:
            self.release()
            self._range.free()
            self._range = None


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("gpu_direct", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp of the driver API."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


class _VirtualRange:
    """Reserved addresses with memory mapped in chunks (the CUDA driver's virtual memory management)."""

    # One allocation of many GB can fail where chunks of this size do not.
    _CHUNK = 1 << 30

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.empty(1, device=f"cuda:{index}")  # creates the device's context, which the driver calls below need
        self._index = index
        self._where = _Location(_DEVICE, index)
        self._properties = _AllocationProperties(type=_PINNED, location=self._where)
        granularity = ctypes.c_size_t()
        driver_call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self._size = -(-max(size, 1) // granularity.value) * granularity.value
        self._chunk = -(-self._CHUNK // granularity.value) * granularity.value
        self._address = ctypes.c_uint64()
        driver_call(
            "cuMemAddressReserve",
            ctypes.byref(self._address), ctypes.c_size_t(self._size), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self._handles: list[tuple[int, int, ctypes.c_uint64]] = []
        self._asked = size
        self.map()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._asked,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def map(self) -> None:
        if torch.cuda.mem_get_info(self._index)[0] < self._size:
            torch.cuda.empty_cache()  # memory cached by torch is not free for the driver
        try:
            for start in range(0, self._size, self._chunk):
                size = min(self._chunk, self._size - start)
                handle = ctypes.c_uint64()
                driver_call(
                    "cuMemCreate",
                    ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._properties), ctypes.c_uint64(0),
                )  # fmt: skip
                self._handles.append((start, size, handle))
                record_mapped_bytes(self._index, size)
                at = ctypes.c_uint64(self._address.value + start)
                driver_call("cuMemMap", at, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            access = _Access(self._where, _READ_WRITE)
            driver_call(
                "cuMemSetAccess", self._address, ctypes.c_size_t(self._size), ctypes.byref(access), ctypes.c_size_t(1)
            )
        except RuntimeError as error:
            free, total = torch.cuda.mem_get_info(self._index)
            raise torch.cuda.OutOfMemoryError(
                f"rollout: {self._size / 2**30:.1f} GB of device memory could not be allocated ({error};"
                f" {free / 2**30:.1f} of {total / 2**30:.1f} GB are free). Lower"
                " gpu_memory_utilization, or offload the trainer."
            ) from error

    def unmap(self) -> None:
        for start, size, handle in self._handles:
            driver_call("cuMemUnmap", ctypes.c_uint64(self._address.value + start), ctypes.c_size_t(size))
            driver_call("cuMemRelease", handle)
            record_mapped_bytes(self._index, -size)
        self._handles = []

    def free(self) -> None:
        driver_call("cuMemAddressFree", self._address, ctypes.c_size_t(self._size))


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


logger = logging.getLogger(__name__)

# Share of available host memory for KV: other programs need the rest.
_HOST_SHARE = 0.25
# Share of device memory left for workspaces of kernels and CUDA graphs.
_DEVICE_RESERVE = 0.03
# float32 tensors [sequences, vocabulary] that sampling allocates at most besides the logits.
_LOGIT_COPIES = 3


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """KV bytes of a token: a key and a value of every head in every layer."""
    return 2 * layers * kv_heads * head_dim * itemsize


def bytes_per_block(model: InferenceModel, block_size: int) -> int:
    """KV bytes of `block_size` tokens in every layer."""
    return block_size * bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, model.dtype.itemsize)


class KVCache:
    """The paged KV cache: `num_blocks` blocks, and one more (`padding_block`) to which padding rows write."""

    def __init__(self, model: InferenceModel, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.padding_block = num_blocks
        self.region = Region((num_blocks + 1) * bytes_per_block(model, block_size), model.device)
        shape = (model.num_layers, 2, num_blocks + 1, block_size, model.num_kv_heads, model.head_dim)
        self._all = self.region.bytes.view(model.dtype).view(shape)
        self.layers: list[LayerKVCache] = [(layer[0], layer[1]) for layer in self._all]
        self._clear()
        self._experts: torch.Tensor | None = None

    def record_experts(self, model: InferenceModel) -> None:
        """Store the experts of every token beside its KV from now on, so that a cached prefix includes its experts."""
        table = model.record_experts((self.num_blocks + 1) * self.block_size)
        self._experts = table.unflatten(0, (-1, self.block_size))

    def experts_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Experts [tokens, layers, k] of the tokens whose KV is at `slots` [tokens], as a copy on the device."""
        assert self._experts is not None, "this KV cache stores no experts"
        return self._experts.flatten(0, 1)[slots]

    @property
    def held_bytes(self) -> int:
        """Bytes allocated now."""
        return self.region.size if self.region.held else 0

    def release(self) -> None:
        """Free the memory; all KV is lost."""
        self.region.release()

    def restore(self) -> None:
        """Allocate the memory again; the KV is not restored."""
        self.region.restore()
        self._clear()

    def _clear(self) -> None:
        """Zero the memory on GPUs: kernels multiply masked entries by zero, which would spread NaN.

        CPU attention reads no masked entries; there, untouched memory is not even allocated.
        """
        if self.region.device.type != "cpu":
            self._all.zero_()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), all at once."""
        if pairs:
            (index,) = copy_to_device([torch.tensor(pairs, dtype=torch.int64)], self._all.device)
            self._all[:, :, index[:, 1]] = self._all[:, :, index[:, 0]]
            if self._experts is not None:
                self._experts[index[:, 1]] = self._experts[index[:, 0]]


def choose_num_blocks(
    model: InferenceModel,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    gpu_memory_utilization: float,
) -> int:
    """Number of blocks for `max_num_seqs` sequences of `max_model_len` tokens, or as many as fit; logs it.

    On a GPU, weights and KV take at most `gpu_memory_utilization` of its memory, and never more than is free. On a CPU,
    KV takes at most a quarter of the available memory.
    """
    block_bytes = bytes_per_block(model, block_size)
    per_sequence = -(-max_model_len // block_size)
    wanted = max_num_seqs * per_sequence
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(model.device)
        logits = logit_bytes(max_num_seqs, model.vocab_size)
        available = device_kv_bytes(total, free, gpu_memory_utilization, model.region.size, logits)
        remedy = "Raise gpu_memory_utilization, or lower max_model_len"
    else:
        available = host_kv_bytes(host_memory_available())
        remedy = "Free host memory, or lower max_model_len"
    blocks = min(wanted, available // block_bytes)
    if blocks < per_sequence:
        raise ValueError(
            f"max_model_len: the KV of one sequence of {max_model_len} tokens takes"
            f" {_gb(per_sequence * block_bytes)}, but only {_gb(available)} are available. {remedy}."
        )
    logger.info(
        "rollout: %s of KV cache: %d blocks of %d tokens (%s)",
        _gb(blocks * block_bytes),
        blocks,
        block_size,
        f"enough for {max_num_seqs} sequences of {max_model_len} tokens"
        if blocks == wanted
        else f"{blocks / wanted:.0%} of what {max_num_seqs} sequences of {max_model_len} tokens can use",
    )
    return blocks


def device_kv_bytes(total: int, free: int, utilization: float, weight_bytes: int, logits: int) -> int:
    """Bytes for KV on a GPU of `total` bytes, of which `free` are free after loading the weights."""
    return max(0, min(int(utilization * total) - weight_bytes, free - int(_DEVICE_RESERVE * total)) - logits)


def host_kv_bytes(available: int) -> int:
    """Bytes for KV on a CPU."""
    return int(_HOST_SHARE * available)


def logit_bytes(sequences: int, vocab: int, truncated: bool = True) -> int:
    """Bytes of the logits and of sampling's work tensors, which a GPU needs only for top-k, top-p and min-p."""
    return sequences * vocab * 4 * (1 + (_LOGIT_COPIES if truncated else 0))


def step_bytes(tokens: int, hidden: int, intermediate: int, itemsize: int) -> int:
    """Peak activation bytes of a step: residual, a norm's output, and the three products of the MLP."""
    return tokens * itemsize * (2 * hidden + 3 * intermediate)


def _gb(size: int) -> str:
    return f"{size / 2**30:.2f} GB"
