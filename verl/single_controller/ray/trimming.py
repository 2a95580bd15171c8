"""Columns without their padding: how one is trimmed, and how any rows of several are read back.

With P and R the padded prompt and response widths, row i of a batch is real on the window [P - prompt_i,
P + response_i) of a sequence column ([rows, P + R]), and on the matching parts of a prompt column ([rows, P],
left-padded) and a response column ([rows, R], right-padded). Only the windows are kept, end to end, with their offsets;
reading pads to the longest row present. What a column's axis is and its padding holds, `verl.types.schema` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verl.types.schema import COLUMNS, OBJECT, PROMPT, RESPONSE, ROW, SEQUENCE, Axis, filler

Picks = list[tuple[np.ndarray, np.ndarray]]
"""For each stored part: places in the result, rows of the part."""


@dataclass(frozen=True)
class Lengths:
    """Real prompt and response tokens of every row: int64 [rows] each."""

    prompt: np.ndarray
    response: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt)

    def __getitem__(self, rows: slice | np.ndarray) -> Lengths:
        return Lengths(self.prompt[rows], self.response[rows])

    @property
    def widths(self) -> tuple[int, int]:
        """(P, R): the longest of each."""
        return int(self.prompt.max(initial=0)), int(self.response.max(initial=0))

    @staticmethod
    def concat(parts: Sequence[Lengths]) -> Lengths:
        """The rows of all parts."""
        return Lengths(np.concatenate([p.prompt for p in parts]), np.concatenate([p.response for p in parts]))

    def windows(self, axis: Axis, prompt_width: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of the real part of every row of a column of this axis, padded to `prompt_width`."""
        if axis == RESPONSE:
            return np.zeros_like(self.response), self.response
        start = prompt_width - self.prompt
        return start, start + self.prompt + (self.response if axis == SEQUENCE else 0)


@dataclass(frozen=True)
class ColumnType:
    """What kind of column it is; all its stored parts agree on this (the padding aside)."""

    axis: Axis
    dtype: str = ""
    inner: tuple[int, ...] = ()
    """Shape of one token, or of one row where there is no token axis."""
    pad: float | None = None

    @staticmethod
    def merged(name: str, types: Sequence[ColumnType]) -> ColumnType:
        """The type of all parts of a column; ValueError where they do not fit together."""
        shapes = {replace(column_type, pad=None) for column_type in types}
        if len(shapes) > 1:
            found = " and ".join(sorted(map(str, shapes)))
            raise ValueError(
                f"DataProto.concat: {name!r} differs between parts: {found}."
                " (A column per token must be blank outside the responses to be stored without padding.)"
            )
        return next((column_type for column_type in types if column_type.pad is not None), types[0])

    def __str__(self) -> str:
        return f"{self.axis} {self.dtype} {list(self.inner)}"


def lengths_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Lengths, tuple[int, int]] | None:
    """Lengths and padded widths (P, R), from `attention_mask` and `responses`; None for a batch of another form."""
    mask = tensors.get("attention_mask")
    if mask is None or mask.ndim != 2 or mask.shape[0] == 0:
        return None
    response_width = tensors["responses"].shape[1] if "responses" in tensors else 0
    prompt_width = mask.shape[1] - response_width
    if prompt_width < 0:
        return None
    real = mask != 0
    prompt, response = real[:, :prompt_width], real[:, prompt_width:]
    left_padded = bool((prompt[:, 1:] >= prompt[:, :-1]).all())
    right_padded = bool((response[:, 1:] <= response[:, :-1]).all())
    if not (left_padded and right_padded):
        return None
    return Lengths(prompt.sum(1).numpy(), response.sum(1).numpy()), (prompt_width, response_width)


def trimmed(name: str, value: torch.Tensor, lengths: Lengths | None, widths: tuple[int, int]) -> tuple[ColumnType, Any]:
    """A token column's real tokens end to end and their offsets, (values, offsets); any other column as it is."""
    array, dtype = as_numpy(value), str(value.dtype).removeprefix("torch.")
    axis = _axis_of(name, value, widths)
    if lengths is not None and axis != ROW:
        starts, ends = lengths.windows(axis, widths[0])
        pad = _first_padding(value, starts, ends) if filler(name) is None else filler(name)
        # A column of the user's own that is not blank in the padding may be no token column at all.
        if name in COLUMNS or _is_blank_outside(value, starts, ends, pad):
            offsets = np.concatenate([[0], np.cumsum(ends - starts)])
            values = np.empty((int(offsets[-1]), *array.shape[2:]), dtype=array.dtype)
            for row, start, end, at in zip(array, starts.tolist(), ends.tolist(), offsets.tolist(), strict=False):
                values[at : at + end - start] = row[start:end]
            return ColumnType(axis, dtype, tuple(value.shape[2:]), pad), (values, offsets)
    return ColumnType(ROW, dtype, tuple(value.shape[1:])), np.ascontiguousarray(array)


def padded(column: ColumnType, parts: list[Any], picks: Picks, rows: int, lengths: Lengths | None) -> Any:
    """Rows of a column's parts, in memory of our own."""
    if column.axis == OBJECT:
        inner = parts[0].shape[1:] if parts else ()
        result = target = np.empty((rows, *inner), dtype=np.result_type(*parts) if parts else object)
    elif column.axis == ROW:
        result = torch.empty((rows, *column.inner), dtype=getattr(torch, column.dtype))
        target = as_numpy(result)
    else:
        assert lengths is not None, "a token column is stored with its lengths"
        return _padded_tokens(column, parts, picks, lengths)
    for part, (places, chosen) in zip(parts, picks, strict=True):
        target[places] = part[chosen]
    return result


def _padded_tokens(column: ColumnType, parts: list[Any], picks: Picks, lengths: Lengths) -> torch.Tensor:
    """Padded to the longest prompt and response among the rows."""
    prompt_width, response_width = lengths.widths
    width = _widths(prompt_width, response_width)[column.axis]
    dtype = getattr(torch, column.dtype)
    result = torch.full((len(lengths), width, *column.inner), column.pad or 0, dtype=dtype)
    target = as_numpy(result)
    starts, ends = lengths.windows(column.axis, prompt_width)
    for (values, offsets), (places, chosen) in zip(parts, picks, strict=True):
        spans = (places, starts[places], ends[places], offsets[chosen])
        for place, start, end, at in zip(*(span.tolist() for span in spans), strict=True):
            target[place, start:end] = values[at : at + end - start]
    return result


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as an array; types that numpy lacks (bfloat16, float8) as integers of their size."""
    tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()]).numpy()


def _widths(prompt: int, response: int) -> dict[Axis, int]:
    return {PROMPT: prompt, RESPONSE: response, SEQUENCE: prompt + response}


def _axis_of(name: str, value: torch.Tensor, widths: tuple[int, int]) -> Axis:
    """Which padding a tensor has: for the schema's columns their axis says, for others their width. ROW: none."""
    if value.ndim < 2:
        return ROW
    axes: tuple[Axis, ...] = (COLUMNS[name].axis,) if name in COLUMNS else (SEQUENCE, RESPONSE)
    return next((axis for axis in axes if _widths(*widths).get(axis) == value.shape[1]), ROW)


def _first_padding(value: torch.Tensor, starts: np.ndarray, ends: np.ndarray) -> float | None:
    """A value found in the padding; None where no row has any."""
    left, right = np.flatnonzero(starts > 0), np.flatnonzero(ends < value.shape[1])
    if not len(left) and not len(right):
        return None
    cell = value[int(left[0]), 0] if len(left) else value[int(right[0]), -1]
    return cell.reshape(-1)[0].item() if cell.numel() else None


def _is_blank_outside(value: torch.Tensor, starts: np.ndarray, ends: np.ndarray, pad: float | None) -> bool:
    positions = torch.arange(value.shape[1])
    outside = (positions < torch.from_numpy(starts)[:, None]) | (positions >= torch.from_numpy(ends)[:, None])
    return pad is None or bool((value[outside] == pad).all())
