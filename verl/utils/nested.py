"""Nested values of tensors, arrays and plain data: comparison, byte views for other processes, and files.

`save_plain` writes with `torch.save` and `load_plain` reads with `torch_archive`, so nothing in a file can execute.
Tensors stay tensors. Values that the reader does not know, or reads slowly, become tagged tuples, and their bytes go
into one common tensor: ("array", dtype, shape, start, stop), ("dict", keys, values) … A tuple in the file is always
tagged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.utils.balancing import roundup_divisible
from verl.utils.disk import atomic_write
from verl.utils.torch_archive import load_archive

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


# ---------------------------------------------------------------- files of plain data

_FORMAT = "verl.plain/1"
_ALIGNMENT = 16
_LONG_LIST = 16


def save_plain(value: Any, path: str | os.PathLike, what: str = "value") -> None:
    """Write `value` to `path` atomically."""
    encoder = _Encoder()
    _write({"format": _FORMAT, "value": encoder.encode(value, what), "bytes": encoder.joined_bytes()}, Path(path))


def is_plain(value: Any) -> bool:
    """Return whether `save_plain` can write the value."""
    try:
        _Encoder().encode(value, "value")
    except TypeError:
        return False
    return True


def save_tensors(tensors: Mapping[str, torch.Tensor], path: str | os.PathLike) -> None:
    """Write a plain dict of tensors: `torch.load(path, weights_only=True)` returns the same dict."""
    encoder = _Encoder()
    _write({str(name): encoder.encode(tensor, str(name)) for name, tensor in tensors.items()}, Path(path))


def load_plain(path: str | os.PathLike) -> Any:
    """Read a file of `save_plain`. Tensors are mapped from the file and read on access; writes stay in memory."""
    try:
        content = load_archive(path, mapped=True)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        return _decode(content["value"], content["bytes"].numpy())
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        cause = str(error).partition("\n")[0]
        raise ValueError(
            f"{path}: not a file of plain data, or damaged; nothing in it was executed. ({cause})"
        ) from error


def _write(content: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as stream:
        torch.save(content, stream)


class _Encoder:
    """Converts nested values to their plain form, and collects the bytes of arrays and bytes objects."""

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []
        self._size = 0

    def encode(self, value: Any, where: str) -> Any:
        """Return the plain form of `value`. TypeError, with the path inside the value: it cannot be stored."""
        if value is None or type(value) in (bool, float, str):
            return value
        if type(value) is int:
            # Longer ones need pickle opcodes that the restricted reader does not know.
            return value if value.bit_length() < 64 else ("int", hex(value))
        if type(value) is bytes:
            return ("bytes", *self._append(np.frombuffer(value, dtype=np.uint8)))
        if isinstance(value, torch.Tensor):
            # Of a view, only its own elements are stored.
            value = value.detach().cpu()
            return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
        if isinstance(value, np.ndarray):
            return self._encode_array(value, where)
        if isinstance(value, np.generic):
            return ("scalar", self._encode_array(np.asarray(value), where))
        if isinstance(value, list):
            return self._encode_list(value, where)
        if isinstance(value, tuple):
            return ("tuple", self._encode_list(list(value), where))
        if isinstance(value, dict):
            keys = [self.encode(key, f"{where} key {key!r}") for key in value]
            return ("dict", keys, [self.encode(item, f"{where}[{key!r}]") for key, item in value.items()])
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored without"
            " pickling code. Convert it to tensors, arrays, strings, numbers, lists or dicts first."
        )

    def joined_bytes(self) -> torch.Tensor:
        """Return all bytes so far as one tensor."""
        joined = np.zeros(self._size, dtype=np.uint8)
        start = 0
        for piece in self._pieces:
            joined[start : start + piece.nbytes] = piece
            start += roundup_divisible(piece.nbytes, _ALIGNMENT)
        return torch.from_numpy(joined)

    def _encode_list(self, items: list[Any], where: str) -> Any:
        kinds = set(map(type, items)) if len(items) >= _LONG_LIST else set()
        if kinds == {int} and max(map(int.bit_length, items)) < 64:
            return ("numbers", self._encode_array(np.array(items, dtype=np.int64), where))
        if kinds == {float}:
            return ("numbers", self._encode_array(np.array(items, dtype=np.float64), where))
        return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(items)]

    def _encode_array(self, array: np.ndarray, where: str) -> tuple[Any, ...]:
        shape = list(array.shape)
        if array.dtype == object:
            return ("objects", shape, [self.encode(x, f"{where}[{i}]") for i, x in enumerate(array.reshape(-1))])
        if array.dtype.hasobject or array.dtype.kind == "V":  # records, and dtypes of other packages
            raise TypeError(f"{where}: an array of dtype {array.dtype} cannot be stored. Use a plain dtype or object.")
        return ("array", array.dtype.str, shape, *self._append(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))

    def _append(self, piece: np.ndarray) -> tuple[int, int]:
        start = self._size
        self._pieces.append(piece)
        self._size += roundup_divisible(piece.nbytes, _ALIGNMENT)
        return start, start + piece.nbytes


def _decode(value: Any, data: np.ndarray) -> Any:
    if isinstance(value, list):
        return [_decode(item, data) for item in value]
    if not isinstance(value, tuple):
        return value
    tag, *content = value
    if tag == "dict":
        keys, values = (_decode(part, data) for part in content)
        return dict(zip(keys, values, strict=True))
    if tag == "tuple":
        return tuple(_decode(content[0], data))
    if tag == "array":
        dtype, shape, start, stop = content
        return data[start:stop].view(np.dtype(dtype)).reshape(shape)
    if tag == "objects":
        shape, items = content
        array = np.empty(len(items), dtype=object)
        for i, item in enumerate(items):
            array[i] = _decode(item, data)
        return array.reshape(shape)
    if tag == "scalar":
        return _decode(content[0], data)[()]
    if tag == "numbers":
        return _decode(content[0], data).tolist()
    if tag == "bytes":
        return data[content[0] : content[1]].tobytes()
    if tag == "int":
        return int(content[0], 16)
    raise ValueError(f"unknown tag {tag!r}")
