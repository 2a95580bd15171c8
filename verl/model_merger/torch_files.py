"""What files of `torch.save` say, without running anything that is named in them.

Pickles name classes to import and functions to call; those of sharded tensors also differ between versions of torch and
want a process group. Here every one of them becomes an `Opaque`, a note of what stood there, and tensors become
descriptions of where their bytes are. So this is narrower than torch's own `weights_only`, reads files of other
versions, and takes no memory for weights.
"""

from __future__ import annotations

import codecs
import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch

from verl.model_merger.stored import FileTensor, Stored, StridedTensor

_LOCAL_HEADER = 30


class Opaque:
    """An object of a class that is not imported."""

    kind: ClassVar[str] = ""
    """The name of the class."""
    args: tuple[Any, ...]
    fields: dict[str, Any]
    state: Any
    """Where it is no fields."""

    def __new__(cls, *args: Any, **fields: Any) -> Opaque:
        made = object.__new__(cls)
        made.args, made.fields, made.state = args, fields, None
        return made

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # of slots: (None, fields)
        if all(part is None or isinstance(part, dict) for part in parts):
            self.fields = {name: value for part in parts for name, value in (part or {}).items()}
        else:
            self.state = state


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """The object in a file of `torch.save`, or in that part of it; its tensors are `Stored`."""
    with _named_errors(path), path.open("rb") as file:
        end = start + length if length is not None else file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(_Part(file, start, end)) as archive:
            return _Unpickler(*_contents(archive, file, path, start)).load()


def read_pickle(path: Path) -> Any:
    """The object in a plain pickle."""
    with _named_errors(path), path.open("rb") as file:
        return _Unpickler(file, path, _no_storage).load()


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise ValueError(f"{path}: not a whole file of torch.save ({error}). Copy it again.") from error


def _contents(
    archive: zipfile.ZipFile, file: BinaryIO, path: Path, start: int
) -> tuple[BinaryIO, Path, Callable[[str], int]]:
    """The pickle in an archive of torch that begins at `start`, and where its storages' bytes are in the file."""
    pickled = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
    if pickled is None:
        raise KeyError("it has no data.pkl")
    root = pickled.removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise TypeError("it was written on a big-endian machine")

    def position(key: str) -> int:
        info = archive.getinfo(f"{root}data/{key}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise TypeError("it is compressed")
        header = start + info.header_offset
        file.seek(header)
        name, extra = struct.unpack("<HH", file.read(_LOCAL_HEADER)[26:])
        return header + _LOCAL_HEADER + name + extra

    return io.BytesIO(archive.read(pickled)), path, position


class _Part(io.RawIOBase):
    """Part of a file as a file: an archive is looked for at the end, and its parts are counted from the beginning."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._end = file, start, end

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begins = {io.SEEK_SET: self._start, io.SEEK_CUR: self._file.tell(), io.SEEK_END: self._end}[whence]
        if begins + offset < self._start:
            raise OSError("before the beginning")
        return self._file.seek(begins + offset) - self._start

    def tell(self) -> int:
        return self._file.tell() - self._start

    def readinto(self, buffer: Any) -> int:
        found = self._file.read(max(0, min(len(buffer), self._end - self._file.tell())))
        buffer[: len(found)] = found
        return len(found)


@dataclass(frozen=True)
class _Storage:
    path: Path
    position: int
    dtype: torch.dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: BinaryIO, path: Path, position: Callable[[str], int]) -> None:
        super().__init__(pickled)
        self._path, self._position = path, position

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _opaque(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, _ = pid
        name = kind.kind.removeprefix("torch.").removeprefix("storage.")
        dtype = _STORAGES.get(name)
        if dtype is None:
            raise pickle.UnpicklingError(f"a {name} is unknown")
        return _Storage(self._path, self._position(key), dtype)


@cache
def _opaque(kind: str) -> type[Opaque]:
    return type(kind.rpartition(".")[2], (Opaque,), {"kind": kind})


def _no_storage(key: str) -> int:
    raise pickle.UnpicklingError("a tensor where there should be none")


def _tensor(storage: _Storage, offset: int, shape: Any, stride: Any, *rest: Any) -> Stored:
    """`rest`: whether it learns, hooks, and of storages without a type the dtype."""
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
    shape, stride = tuple(shape), tuple(stride)
    position = storage.position + offset * dtype.itemsize
    wanted = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    in_order = all(length == 1 or step == each for length, step, each in zip(shape, stride, wanted, strict=True))
    if in_order or not math.prod(shape):
        return FileTensor(storage.path, position, shape, dtype)
    span = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    return StridedTensor(FileTensor(storage.path, position, (span,), dtype), shape, stride)


def _made(make: Callable[..., Any], kind: type, args: tuple[Any, ...], state: Any) -> Any:
    made = make(*args)
    if isinstance(made, Opaque):
        made.__setstate__(state)
    return made


def _text(text: str, encoding: str) -> bytes:
    return codecs.encode(text, "latin1") if encoding == "latin1" else b""


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
    ("torch._utils", "_rebuild_wrapper_subclass"): lambda kind, *args: kind(*args),
    ("torch._tensor", "_rebuild_from_type_v2"): _made,
    ("_codecs", "encode"): _text,
    # A class inside a class.
    **{
        (module, "getattr"): lambda outer, name: _opaque(f"{outer.kind}.{name}")
        for module in ("builtins", "__builtin__")
    },
}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
