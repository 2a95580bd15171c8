"""Tensors in files: read part by part, in the requested precision, without loading them whole."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from verl.utils.torch_archive import TensorLocation, dimensions, read_archive
from verl.workers.engine.common.hf_export import DTYPE_NAMES

Box: TypeAlias = tuple[range, ...]
"""A part of a tensor: the range of indices in each dimension."""
# Bytes that are read at once.
_BLOCK_BYTES = 4 * 2**20


class LazyTensor(Protocol):
    """A tensor in files, read part by part."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box, target: torch.Tensor) -> None:
        """Read the part `box` into `target`, a tensor of that shape and any dtype."""


def read_tensor(tensor: LazyTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Read the full tensor."""
    target = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
    tensor.read(full_box(tensor.shape), target)
    return target


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return tuple(range(length) for length in shape)


def rows_per_block(width: int, itemsize: int) -> int:
    """Return how many rows of `width` elements are read at once."""
    return max(1, _BLOCK_BYTES // max(1, width * itemsize))


@dataclass(frozen=True)
class FileTensor:
    """A contiguous tensor in one file."""

    path: Path
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box, target: torch.Tensor) -> None:
        if not target.numel():
            return
        position, shape = self.position, self.shape
        if not shape:
            shape, box, target = (1,), (range(1),), target.view(1)
        # A single entry of the first dimension is read block by block of its own rows.
        while len(box) > 1 and len(box[0]) == 1:
            position += box[0].start * math.prod(shape[1:]) * self.dtype.itemsize
            shape, box, target = shape[1:], box[1:], target[0]
        width = math.prod(shape[1:])
        step = min(len(box[0]), rows_per_block(width, self.dtype.itemsize))
        block = torch.empty((step, *shape[1:]), dtype=self.dtype)
        inside = (slice(None), *slices(box[1:]))
        with self.path.open("rb", buffering=0) as file:
            for first in range(0, len(box[0]), step):
                rows = block[: len(box[0]) - first]
                file.seek(position + (box[0].start + first) * width * self.dtype.itemsize)
                self._fill(file, rows)
                target[first : first + step].copy_(rows[inside])

    def _fill(self, file: io.FileIO, rows: torch.Tensor) -> None:
        left = memoryview(rows.view(-1).view(torch.uint8).numpy())
        while left:
            count = file.readinto(left)
            if not count:
                raise ValueError(f"{self.path}: truncated: it ends at byte {file.tell()}, inside a tensor.")
            left = left[count:]


@dataclass(frozen=True)
class StridedTensor:
    """A non-contiguous tensor in one file; its whole span is read at once."""

    span: FileTensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.span.dtype

    def read(self, box: Box, target: torch.Tensor) -> None:
        target.copy_(read_tensor(self.span).as_strided(self.shape, self.stride)[slices(box)])


@dataclass(frozen=True)
class TensorPiece:
    """The part of a tensor at offsets `at`, stored in `tensor` at offsets `start`."""

    at: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: LazyTensor
    start: tuple[int, ...]


@dataclass(frozen=True)
class AssembledTensor:
    """A tensor of pieces that cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]

    def read(self, box: Box, target: torch.Tensor) -> None:
        for piece in self.pieces:
            ends = [at + length for at, length in zip(piece.at, piece.shape, strict=True)]
            common = [
                range(max(requested.start, at), min(requested.stop, end))
                for requested, at, end in zip(box, piece.at, ends, strict=True)
            ]
            if not all(common):
                continue
            inner = tuple(
                range(overlap.start - at + start, overlap.stop - at + start)
                for overlap, at, start in zip(common, piece.at, piece.start, strict=True)
            )
            index = tuple(
                slice(overlap.start - requested.start, overlap.stop - requested.start)
                for overlap, requested in zip(common, box, strict=True)
            )
            piece.tensor.read(inner, target[index])


def assemble(where: str, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[TensorPiece]) -> AssembledTensor:
    """Return the tensor of these pieces; ValueError, which names `where`, if they do not cover it."""
    stored, size = sum(math.prod(piece.shape) for piece in pieces), math.prod(shape)
    if stored != size:
        raise ValueError(f"{where}: {stored} of {size} elements are in the files. Copy the whole checkpoint again.")
    return AssembledTensor(tuple(shape), dtype, tuple(pieces))


def first_rows(tensor: LazyTensor, rows: int) -> AssembledTensor:
    """Return the tensor without the rows after the first `rows`."""
    shape = (rows, *tensor.shape[1:])
    zeros = tuple(0 for _ in shape)
    return AssembledTensor(shape, tensor.dtype, (TensorPiece(zeros, shape, tensor, zeros),))


@dataclass(frozen=True)
class IndexedTensor:
    """One tensor of a stack along the first dimensions."""

    stack: LazyTensor
    index: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[len(self.index) :]

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    def read(self, box: Box, target: torch.Tensor) -> None:
        at = tuple(range(index, index + 1) for index in self.index)
        self.stack.read((*at, *box), target[(None,) * len(at)])


@dataclass(frozen=True)
class ZeroTensor:
    """A tensor of zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box, target: torch.Tensor) -> None:
        target.zero_()


@dataclass(frozen=True)
class AdaptedTensor:
    """A weight plus `scale` times the product of its LoRA matrices A `down` [rank, in] and B `up` [out, rank].

    Computed in float32.
    """

    base: LazyTensor
    down: LazyTensor
    up: LazyTensor
    scale: float
    transposed: bool
    """The weight is [in, out]."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def read(self, box: Box, target: torch.Tensor) -> None:
        down, up = read_tensor(self.down, torch.float32), read_tensor(self.up, torch.float32)
        left, right = (down.T, up.T) if self.transposed else (up, down)
        rows, columns = box
        step = rows_per_block(len(columns), 4)
        right = right[:, columns.start : columns.stop]
        for start in range(rows.start, rows.stop, step):
            block = range(start, min(start + step, rows.stop))
            values = torch.empty(len(block), len(columns))
            self.base.read((block, columns), values)
            values += (left[block.start : block.stop] @ right) * self.scale
            target[start - rows.start :][: len(block)].copy_(values)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as index."""
    return tuple(slice(rows.start, rows.stop) for rows in box)


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Read the object in a file of `torch.save`, or in a part of it, as LazyTensors and `Record`s of other objects."""
    return read_archive(path, _lazy_tensor, start, length)


def _lazy_tensor(location: TensorLocation) -> LazyTensor:
    if location.contiguous:
        return FileTensor(location.path, location.position, location.shape, location.dtype)
    span = FileTensor(location.path, location.position, (location.span,), location.dtype)
    return StridedTensor(span, location.shape, location.stride)


_MAX_HEADER = 100_000_000  # bytes, a limit of the safetensors format
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def folder_tensors(folder: Path, pattern: str = "*.safetensors") -> dict[str, LazyTensor]:
    """Return the tensors of a Hugging Face folder by name; ValueError if there are none.

    With an index, only the files it lists are read: others (Mistral's `consolidated`) contain the same weights.
    """
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    indexed = set(listed.values())
    files = sorted(path for path in folder.glob(pattern) if not indexed or path.name in indexed)
    if not files and not indexed:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:2]) or "no weight files"
        raise ValueError(f"{folder}: no safetensors files (found: {others}). Use a folder written by save_pretrained.")
    tensors: dict[str, LazyTensor] = {}
    for path in files:
        tensors |= _file_tensors(path)
    missing = sorted({file for name, file in listed.items() if name not in tensors})
    if missing:
        raise ValueError(f"{folder}: {', '.join(missing[:4])} missing or incomplete. Copy the folder again.")
    return tensors


def _file_tensors(path: Path) -> dict[str, FileTensor]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        available = path.stat().st_size - 8 - size
        try:
            if size > _MAX_HEADER or available < 0:
                raise ValueError(f"its header has {size} bytes")
            header = json.loads(file.read(size))
            tensors = {
                name: _tensor(path, 8 + size, available, entry)
                for name, entry in header.items()
                if name != "__metadata__"
            }
            if sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values()) > available:
                raise ValueError("its tensors are larger than the file")
            return tensors
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: damaged safetensors file ({error}). Copy it again.") from error


def _tensor(path: Path, begin: int, available: int, entry: Any) -> FileTensor:
    start, stop = dimensions(entry["data_offsets"])
    shape, dtype = dimensions(entry["shape"]), _DTYPES[entry["dtype"]]
    if not start <= stop <= available or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {list(shape)} has bytes {start} to {stop}")
    return FileTensor(path, begin + start, shape, dtype)


def differences(
    ours: Mapping[str, LazyTensor],
    like: Mapping[str, torch.Tensor | LazyTensor],
    theirs: Mapping[str, LazyTensor],
    tolerance: float,
    aliases: Mapping[str, str],
) -> list[str]:
    """Return a line per difference. `like`: shapes and dtypes of our tensors in files; `aliases`: our name by other
    names of tied tensors."""
    lines = [f"{name}: missing in --test_hf_dir" for name in ours if name not in theirs]
    for name, value in theirs.items():
        own = aliases.get(name, name)
        if own not in ours:
            lines.append(f"{name}: only in --test_hf_dir")
        elif tuple(like[own].shape) != tuple(value.shape):
            lines.append(f"{name}: {list(like[own].shape)}, in --test_hf_dir {list(value.shape)}")
        else:
            if like[own].dtype != value.dtype:
                lines.append(f"{name}: {_dtype_name(like[own].dtype)}, in --test_hf_dir {_dtype_name(value.dtype)}")
            difference = value_difference(ours[own], value, tolerance, like[own].dtype)
            lines += [f"{name}: {difference}"] if difference else []
    return lines


def value_difference(ours: LazyTensor, theirs: LazyTensor, tolerance: float, dtype: torch.dtype | None = None) -> str:
    """Describe how values differ by more than `tolerance`; "" if they do not. `dtype`: ours are cast to it first."""
    if tuple(ours.shape) != tuple(theirs.shape):
        return f"{list(ours.shape)} and {list(theirs.shape)}"
    count, most = 0, 0.0
    shape = tuple(theirs.shape) or (1,)
    step = rows_per_block(math.prod(shape[1:]), 8)
    for start in range(0, shape[0], step):
        rows = range(start, min(start + step, shape[0]))
        box = (rows, *full_box(shape[1:])) if theirs.shape else ()
        own = torch.empty([len(rows) for rows in box], dtype=dtype or ours.dtype)
        other = torch.empty([len(rows) for rows in box], dtype=theirs.dtype)
        ours.read(box, own)
        theirs.read(box, other)
        wide = own.to(theirs.dtype).double(), other.double()
        differs = ~torch.isclose(*wide, rtol=0.0, atol=tolerance, equal_nan=True)
        if differs.any():
            count += int(differs.sum())
            most = max(most, float((wide[0] - wide[1])[differs].abs().nan_to_num(math.inf).max()))
    return f"{count} of {math.prod(shape)} values differ, by {most:.3g} at most" if count else ""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
