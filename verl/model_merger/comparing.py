"""Whether two sets of stored tensors are the same: names, shapes, dtypes and values."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from verl.model_merger.stored import Stored, all_of, rows_at_once


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
