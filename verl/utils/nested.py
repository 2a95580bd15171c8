"""Tensors, arrays and nested values: object arrays, deep comparison, and byte views for other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

WireTensor = tuple[np.ndarray, str, tuple[int, ...]]
"""Bytes, dtype name and shape of a tensor. Pickle protocol 5 transfers the bytes without a copy."""


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Return a one-dimensional object array with exactly these entries (numpy would nest equal-length lists)."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def deep_equal(a: Any, b: Any) -> bool:
    """Return whether two nested values are equal, including dtypes and shapes; NaN equals NaN."""
    if a is b:
        return True
    if type(a) is not type(b):
        return bool(np.isscalar(a) and np.isscalar(b) and a == b)
    if isinstance(a, torch.Tensor | np.ndarray) and (a.shape != b.shape or a.dtype != b.dtype):
        return False
    if isinstance(a, torch.Tensor):
        b = b.to(a.device)
        return _same_bits(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray):
        if a.dtype != object:
            return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
        return all(map(deep_equal, a.reshape(-1), b.reshape(-1)))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(deep_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(deep_equal, a, b))
    return bool(a == b) or bool(a != a and b != b)


def describe_difference(a: Any, b: Any) -> str:
    """Describe how two columns differ: their dtypes and shapes, or the first row that differs."""
    mine, theirs = _describe(a), _describe(b)
    if mine != theirs:
        return f"{mine} and {theirs}"
    return f"first in row {next((i for i in range(len(a)) if not deep_equal(a[i], b[i])), None)}"


def tensor_to_wire(tensor: torch.Tensor) -> WireTensor:
    """Return bytes, dtype name and shape of a tensor; the bytes alias a contiguous CPU tensor.

    Of a view, only its own elements are included. Bytes, because numpy has no bfloat16.
    """
    # Empty and one-element tensors count as contiguous with any strides, hence as_strided and not reshape.
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def tensor_from_wire(wire: WireTensor) -> torch.Tensor:
    """Return a tensor over the received bytes, without a copy.

    torch has no read-only tensors: code that receives read-only bytes must not write to the tensor (see DataProto).
    """
    data, dtype_name, shape = wire
    dtype = getattr(torch, dtype_name)
    if data.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    writable = data if data.flags.writeable else np.asarray(_WritableView(data))
    return torch.from_numpy(writable).view(dtype).reshape(shape)


class _WritableView:
    """The memory of an array without its read-only flag, about which torch would warn."""

    def __init__(self, array: np.ndarray) -> None:
        self.owner = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare the bytes, eight at a time: several times faster than torch.equal, and usually sufficient."""
    if a.device.type != "cpu" or not (a.is_contiguous() and b.is_contiguous()):
        return torch.equal(a, b)
    mine, theirs = tensor_to_wire(a)[0], tensor_to_wire(b)[0]
    words = mine.nbytes // 8 * 8
    same_words = np.array_equal(mine[:words].view(np.int64), theirs[:words].view(np.int64))
    return same_words and np.array_equal(mine[words:], theirs[words:])


def _describe(column: Any) -> str:
    device = f" on {column.device}" if isinstance(column, torch.Tensor) and column.device.type != "cpu" else ""
    return f"{column.dtype} {tuple(column.shape)}{device}"
