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
_BLOCK = 4 * 2**20


class Stored(Protocol):
    """A tensor that can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box, target: torch.Tensor) -> None:
        """Fill `target`, as large as `box` and of any dtype, with that part."""


def whole(tensor: Stored, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All of it."""
    target = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
    tensor.read(all_of(tensor.shape), target)
    return target


def all_of(shape: Sequence[int]) -> Box:
    """The box that is everything."""
    return tuple(range(length) for length in shape)


def rows_at_once(width: int, itemsize: int) -> int:
    """How many rows of so many elements are read together."""
    return max(1, _BLOCK // max(1, width * itemsize))


@dataclass(frozen=True)
class FileTensor:
    """In one file, its elements one after another."""

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
        while len(box) > 1 and len(box[0]) == 1:  # one row: its own rows are the portions to read
            position += box[0].start * math.prod(shape[1:]) * self.dtype.itemsize
            shape, box, target = shape[1:], box[1:], target[0]
        width = math.prod(shape[1:])
        step = min(len(box[0]), rows_at_once(width, self.dtype.itemsize))
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
                raise ValueError(
                    f"{self.path}: ends at byte {file.tell()}, in the middle of a tensor: it is truncated."
                )
            left = left[count:]


@dataclass(frozen=True)
class StridedTensor:
    """In one file, its elements not in order; they are read together."""

    span: FileTensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.span.dtype

    def read(self, box: Box, target: torch.Tensor) -> None:
        target.copy_(whole(self.span).as_strided(self.shape, self.stride)[slices(box)])


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor: the part of another that begins at `start`."""

    at: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Stored
    start: tuple[int, ...]


@dataclass(frozen=True)
class Assembled:
    """Of pieces, which together are all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def read(self, box: Box, target: torch.Tensor) -> None:
        for piece in self.pieces:
            ends = [at + length for at, length in zip(piece.at, piece.shape, strict=True)]
            common = [
                range(max(wanted.start, at), min(wanted.stop, end))
                for wanted, at, end in zip(box, piece.at, ends, strict=True)
            ]
            if not all(common):
                continue
            inner = tuple(
                range(each.start - at + start, each.stop - at + start)
                for each, at, start in zip(common, piece.at, piece.start, strict=True)
            )
            place = tuple(
                slice(each.start - wanted.start, each.stop - wanted.start)
                for each, wanted in zip(common, box, strict=True)
            )
            piece.tensor.read(inner, target[place])


def assembled(where: str, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece]) -> Assembled:
    """ValueError, which names `where`, for pieces that are not all of it."""
    there, size = sum(math.prod(piece.shape) for piece in pieces), math.prod(shape)
    if there != size:
        raise ValueError(f"{where}: {there} of {size} elements are in the files. Copy the checkpoint again, whole.")
    return Assembled(tuple(shape), dtype, tuple(pieces))


def first_rows(tensor: Stored, rows: int) -> Assembled:
    """Without those after them."""
    shape = (rows, *tensor.shape[1:])
    zeros = tuple(0 for _ in shape)
    return Assembled(shape, tensor.dtype, (Piece(zeros, shape, tensor, zeros),))


@dataclass(frozen=True)
class Indexed:
    """One of the tensors that are stacked along the first dimensions of another."""

    stack: Stored
    index: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[len(self.index) :]

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    def read(self, box: Box, target: torch.Tensor) -> None:
        at = tuple(range(each, each + 1) for each in self.index)
        self.stack.read((*at, *box), target[(None,) * len(at)])


@dataclass(frozen=True)
class Zeros:
    """Nothing that is in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box, target: torch.Tensor) -> None:
        target.zero_()


@dataclass(frozen=True)
class Adapted:
    """A weight plus the product of its adapter's matrices, A `down` [rank, in] and B `up` [out, rank], in float32."""

    base: Stored
    down: Stored
    up: Stored
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
        down, up = whole(self.down, torch.float32), whole(self.up, torch.float32)
        left, right = (down.T, up.T) if self.transposed else (up, down)
        rows, columns = box
        step = rows_at_once(len(columns), 4)
        right = right[:, columns.start : columns.stop]
        for start in range(rows.start, rows.stop, step):
            block = range(start, min(start + step, rows.stop))
            values = torch.empty(len(block), len(columns))
            self.base.read((block, columns), values)
            values += (left[block.start : block.stop] @ right) * self.scale
            target[start - rows.start :][: len(block)].copy_(values)


def slices(box: Box) -> tuple[slice, ...]:
    """To index with."""
    return tuple(slice(each.start, each.stop) for each in box)


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """The object in a file of `torch.save`, or in that part of it; its tensors are `Stored`, its objects `Record`s."""
    return read_archive(path, _stored, start, length)


def _stored(place: TensorLocation) -> Stored:
    if place.contiguous:
        return FileTensor(place.path, place.position, place.shape, place.dtype)
    return StridedTensor(FileTensor(place.path, place.position, (place.span,), place.dtype), place.shape, place.stride)


_MAX_HEADER = 100_000_000  # of the format
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def folder_tensors(folder: Path, pattern: str = "*.safetensors") -> dict[str, Stored]:
    """By name, of all files, or of those that an index lists: others beside them (Mistral's `consolidated`) are the
    same weights under other names. ValueError where there are none."""
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    kept = set(listed.values())
    files = sorted(path for path in folder.glob(pattern) if not kept or path.name in kept)
    if not files and not kept:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:2]) or "nothing of the kind"
        raise ValueError(f"{folder}: no safetensors files (found: {others}). Give a folder that save_pretrained wrote.")
    found: dict[str, Stored] = {}
    for path in files:
        found |= _file_tensors(path)
    missing = sorted({file for name, file in listed.items() if name not in found})
    if missing:
        raise ValueError(f"{folder}: {', '.join(missing[:4])} missing or not whole. Copy the folder again.")
    return found


def _file_tensors(path: Path) -> dict[str, FileTensor]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        available = path.stat().st_size - 8 - size
        try:
            if size > _MAX_HEADER or available < 0:
                raise ValueError(f"its header has {size} bytes")
            header = json.loads(file.read(size))
            tensors = {
                name: _tensor(path, 8 + size, available, each)
                for name, each in header.items()
                if name != "__metadata__"
            }
            if sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values()) > available:
                raise ValueError("its tensors are larger than the file")
            return tensors
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: is no whole safetensors file ({error}).") from error


def _tensor(path: Path, begin: int, available: int, entry: Any) -> FileTensor:
    start, stop = dimensions(entry["data_offsets"])
    shape, dtype = dimensions(entry["shape"]), _DTYPES[entry["dtype"]]
    if not start <= stop <= available or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {list(shape)} has bytes {start} to {stop}")
    return FileTensor(path, begin + start, shape, dtype)


def differences(
    ours: Mapping[str, Stored],
    like: Mapping[str, torch.Tensor | Stored],
    theirs: Mapping[str, Stored],
    tolerance: float,
    aliases: Mapping[str, str],
) -> list[str]:
    """A line for each; `like` says what ours will be, `aliases` which of their names are tied to which of ours."""
    found = [f"{name}: missing in the other" for name in ours if name not in theirs]
    for name, value in theirs.items():
        own = aliases.get(name, name)
        if own not in ours:
            found.append(f"{name}: only in the other")
        elif tuple(like[own].shape) != tuple(value.shape):
            found.append(f"{name}: {list(like[own].shape)}, in the other {list(value.shape)}")
        else:
            if like[own].dtype != value.dtype:
                found.append(f"{name}: {_plain(like[own].dtype)}, in the other {_plain(value.dtype)}")
            words = value_difference(ours[own], value, tolerance, like[own].dtype)
            found += [f"{name}: {words}"] if words else []
    return found


def value_difference(ours: Stored, theirs: Stored, tolerance: float, dtype: torch.dtype | None = None) -> str:
    """How values differ by more than `tolerance`, in words; "" where they do not. `dtype`: ours, before comparing."""
    if tuple(ours.shape) != tuple(theirs.shape):
        return f"{list(ours.shape)} and {list(theirs.shape)}"
    count, most = 0, 0.0
    shape = tuple(theirs.shape) or (1,)
    step = rows_at_once(math.prod(shape[1:]), 8)
    for start in range(0, shape[0], step):
        rows = range(start, min(start + step, shape[0]))
        box = (rows, *all_of(shape[1:])) if theirs.shape else ()
        own = torch.empty([len(each) for each in box], dtype=dtype or ours.dtype)
        other = torch.empty([len(each) for each in box], dtype=theirs.dtype)
        ours.read(box, own)
        theirs.read(box, other)
        wide = own.to(theirs.dtype).double(), other.double()
        apart = ~torch.isclose(*wide, rtol=0.0, atol=tolerance, equal_nan=True)
        if apart.any():
            count += int(apart.sum())
            most = max(most, float((wide[0] - wide[1])[apart].abs().nan_to_num(math.inf).max()))
    return f"{count} of {math.prod(shape)} values differ, by {most:.3g} at most" if count else ""


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
