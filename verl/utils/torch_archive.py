"""Read files of `torch.save` without executing anything in them, with memory bounded by the size of the file.

Tensors are described by their location in the file (`TensorLocation`) and read afterwards. Members of the archive must
be stored uncompressed, storages must lie in the file, and a view has no more elements than its storage.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from verl.utils.safe_pickle import Known, Record, load_records, open_regular

__all__ = ["TensorLocation", "dimensions", "load_archive", "plain_types", "read_archive", "read_tensor"]

_LOCAL_HEADER = 30
_MAX_DIMS = 32


@dataclass(frozen=True)
class TensorLocation:
    """A tensor in a file: a view of a storage."""

    path: Path
    storage: int
    """Position of its storage in the file, in bytes."""
    storage_bytes: int
    offset: int
    """Offset of its first element in the storage, in elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def position(self) -> int:
        """Position of its first element in the file, in bytes."""
        return self.storage + self.offset * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Number of storage elements from its first to its last one."""
        return (
            1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) if self.numel else 0
        )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether its elements are consecutive in row-major order."""
        steps = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return not self.numel or all(
            size == 1 or step == expected for size, step, expected in zip(self.shape, self.stride, steps, strict=True)
        )


def read_archive(
    path: Path, convert: Callable[[TensorLocation], Any], start: int = 0, length: int | None = None, plain: bool = False
) -> Any:
    """Return the object in a file of `torch.save`, or in a part of a file; `convert` creates its tensors.

    Objects of other classes are `Record`s; with `plain` they are rejected.
    """
    with _named_errors(path), open_regular(path) as file:
        size = file.seek(0, io.SEEK_END)
        end = size if length is None else start + length
        if not 0 <= start <= end <= size:
            raise ValueError(f"bytes {start} to {end} are not in the file of {size} bytes")
        with zipfile.ZipFile(_FileSlice(file, start, end)) as archive:
            contents = _Contents(archive, file, path, start, end)
            return load_records(contents.pickle(), contents.known(convert), contents.storage, () if plain else None)


def load_archive(path: str | os.PathLike[str], mapped: bool = False) -> Any:
    """Return the plain data and tensors (in host memory) in a file of `torch.save`; classes are rejected.

    `mapped`: tensors are mapped from the file and read on access; writes stay in memory.
    """
    storages = _MappedStorages(Path(path)) if mapped else _ReadStorages(Path(path))
    return read_archive(Path(path), storages.tensor, plain=True)


def read_tensor(path: Path, start: int, length: int) -> torch.Tensor:
    """Return the tensor in a part of a file."""
    tensor = read_archive(path, _ReadStorages(path).tensor, start, length, plain=True)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{path}: at byte {start} there is no tensor.")
    return tensor


class _ReadStorages:
    """Storages in memory, each read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, location: TensorLocation) -> torch.Tensor:
        if location.storage not in self._storages:
            self._storages[location.storage] = self._storage(location.storage, location.storage_bytes)
        storage = self._storages[location.storage]
        return torch.empty(0, dtype=location.dtype).set_(storage, location.offset, location.shape, location.stride)

    def _storage(self, position: int, size: int) -> torch.UntypedStorage:
        values = torch.empty(size, dtype=torch.uint8)
        with self._path.open("rb", buffering=0) as file:
            file.seek(position)
            remaining = memoryview(values.numpy())
            while remaining:
                count = file.readinto(remaining)
                if not count:
                    raise ValueError(f"{self._path}: ends at byte {file.tell()}, in a tensor: it is truncated.")
                remaining = remaining[count:]
        return values.untyped_storage()


class _MappedStorages(_ReadStorages):
    """Storages mapped from the file, if their position is aligned; otherwise read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._all = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)

    def _storage(self, position: int, size: int) -> torch.UntypedStorage:
        return self._all[position : position + size] if position % 16 == 0 else super()._storage(position, size)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, ValueError, LookupError, NotImplementedError, struct.error) as error:
        remedy = "If it was truncated, copy it again; otherwise do not use it."
        raise ValueError(f"{path}: cannot be read as a torch.save file: {error}. {remedy}") from error


@dataclass(frozen=True)
class _Storage:
    position: int
    nbytes: int
    dtype: torch.dtype


class _Contents:
    """The pickle of a torch archive between two bytes of a file, and the positions of its storages."""

    def __init__(self, archive: zipfile.ZipFile, file: BinaryIO, path: Path, start: int, end: int) -> None:
        self._archive, self._file, self._path, self._start, self._end = archive, file, path, start, end
        members = archive.infolist()
        packed = next((info.filename for info in members if info.compress_type != zipfile.ZIP_STORED), None)
        if packed is not None:
            raise ValueError(f"{packed[:80]!r} is compressed, and torch.save does not compress")
        if sum(info.file_size for info in members) > end - start:
            raise ValueError("its members are larger than the file")
        name = next((info.filename for info in members if info.filename.endswith("data.pkl")), None)
        if name is None:
            raise ValueError("it has no data.pkl")
        self._root = name.removesuffix("data.pkl")
        byteorder = f"{self._root}byteorder"
        if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
            raise ValueError("it was written on a big-endian machine")

    def pickle(self) -> bytes:
        return self._archive.read(f"{self._root}data.pkl")

    def storage(self, pid: Any) -> _Storage:
        """A persistent id: ("storage", class, key, device, number of elements)."""
        if not (isinstance(pid, tuple) and len(pid) == 5 and isinstance(pid[2], str)):
            raise ValueError("a storage has no key")
        dtype = pid[1]
        if not isinstance(dtype, torch.dtype):
            raise ValueError("a storage has an unknown type")
        info = self._archive.getinfo(f"{self._root}data/{pid[2]}")
        header = self._start + info.header_offset
        self._file.seek(header)
        name, extra = struct.unpack("<HH", self._file.read(_LOCAL_HEADER)[26:])
        position = header + _LOCAL_HEADER + name + extra
        if position + info.file_size > self._end:
            raise ValueError(f"storage {pid[2][:80]!r} ends after the file")
        return _Storage(position, info.file_size, dtype)

    def known(self, convert: Callable[[TensorLocation], Any]) -> Known:
        """Return the replacements of the pickle's globals."""

        def tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Any:
            """`rest`: requires_grad, hooks and, for untyped storages, the dtype."""
            if not isinstance(storage, _Storage):
                raise ValueError("a tensor has no storage")
            dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
            return convert(_locate(self._path, storage, offset, shape, stride, dtype))

        text_bytes = _TextBudget(len(self.pickle()))
        rebuild = "torch._utils"
        return {
            **plain_types(),
            **_STORAGES,
            (rebuild, "_rebuild_tensor"): tensor,
            (rebuild, "_rebuild_tensor_v2"): tensor,
            (rebuild, "_rebuild_tensor_v3"): tensor,
            (rebuild, "_rebuild_parameter"): lambda data, *_: data,
            (rebuild, "_rebuild_parameter_with_state"): lambda data, *_: data,
            (rebuild, "_rebuild_wrapper_subclass"): _wrapper_record,
            ("torch._tensor", "_rebuild_from_type_v2"): _record_with_state,
            ("_codecs", "encode"): text_bytes.encode,
        }


def dimensions(values: Any) -> tuple[int, ...]:
    """Return sizes, strides or offsets, checked to be a short list of non-negative integers."""
    if not isinstance(values, tuple | list) or len(values) > _MAX_DIMS:
        raise ValueError("a shape is not a short list")
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError("a shape has entries that are not sizes")
    return tuple(values)


def plain_types() -> Known:
    """Return dtypes, shapes and dictionaries as `known` argument of `load_records`."""
    return {**_DTYPES, ("torch", "Size"): dimensions, ("collections", "OrderedDict"): _StateDict}


def _locate(path: Path, storage: _Storage, offset: Any, shape: Any, stride: Any, dtype: torch.dtype) -> TensorLocation:
    sizes = dimensions(shape)
    first = dimensions((offset,))[0] if math.prod(sizes) else 0  # an empty slice may begin after its storage
    location = TensorLocation(path, storage.position, storage.nbytes, first, sizes, dimensions(stride), dtype)
    if len(location.shape) != len(location.stride):
        raise ValueError(f"a tensor of {len(location.shape)} dimensions has {len(location.stride)} strides")
    if max(location.numel, first + location.span) * dtype.itemsize > storage.nbytes:
        raise ValueError(f"a tensor of shape {list(location.shape)} has a storage of {storage.nbytes} bytes")
    return location


class _StateDict(dict[Any, Any]):
    """OrderedDict as modules use it: with attributes, which are not kept."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Ignore the versions of modules."""


class _TextBudget:
    """Converts the latin-1 text as which pickle protocol 2 writes bytes; in total at most as many as the pickle has.

    Without the limit, memo references could repeat a text and take any amount of memory.
    """

    def __init__(self, size: int) -> None:
        self._remaining = size

    def encode(self, text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise ValueError("it calls _codecs.encode with other arguments than a text and latin1")
        self._remaining -= len(text)
        if self._remaining < 0:
            raise ValueError("its byte strings are larger than the pickle, so it repeats them")
        return text.encode("latin1")


def _wrapper_record(kind: Any, *args: Any) -> Any:
    """Return the record of a tensor of a wrapper subclass. `kind` is inert, as everything that a pickle can call."""
    return kind(*args)


def _record_with_state(rebuild: Any, _: Any, args: Any, state: Any) -> Any:
    value = rebuild(*args)
    if isinstance(value, Record):
        value.__setstate__(state)
    return value


class _FileSlice(io.RawIOBase):
    """Part of a file as a file: the directory of an archive is at its end, and offsets count from its beginning."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._end = file, start, end

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: self._start, io.SEEK_CUR: self._file.tell(), io.SEEK_END: self._end}[whence]
        if origin + offset < self._start:
            raise ValueError("its directory begins before the file")
        return self._file.seek(origin + offset) - self._start

    def tell(self) -> int:
        return self._file.tell() - self._start

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(max(0, min(len(buffer), self._end - self._file.tell())))
        buffer[: len(content)] = content
        return len(content)


_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGES = {
    (module, f"{name}Storage"): dtype
    for module in ("torch", "torch.storage")
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
        "Untyped": torch.uint8,
    }.items()
}
