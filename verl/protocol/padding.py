"""Filler rows: copies that make a batch divide over the ranks, weigh nothing and are dropped again."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from verl.protocol.dataproto import DataProto

_Proto = TypeVar("_Proto", bound=DataProto)
_MASKS = ("response_mask", "loss_mask")


def pad_dataproto_to_divisor(data: _Proto, size_divisor: int) -> tuple[_Proto, int]:
    """Append rows (wrapping around) until the length divides; returns the batch and how many were added."""
    if size_divisor < 1:
        raise ValueError(f"pad_dataproto_to_divisor: size_divisor is {size_divisor}; it must be at least 1.")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    if len(data) == 0:
        raise ValueError("pad_dataproto_to_divisor: an empty batch has no rows to copy.")
    return data[np.arange(len(data) + pad_size) % len(data)], pad_size


def unpad_dataproto(data: _Proto, pad_size: int) -> _Proto:
    """Drop the `pad_size` rows that `pad_dataproto_to_divisor` added."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"unpad_dataproto: pad_size {pad_size} of {len(data)} rows.")
    return data[: len(data) - pad_size] if pad_size else data


def mask_filler_rows(data: DataProto, fillers: int) -> DataProto:
    """The batch with its last `fillers` rows weighing nothing: their loss masks are 0."""
    masks = [(key, value) for key, value in data.tensors() if key in _MASKS]
    if not fillers or not masks:
        return data
    masked = data.select()
    for key, value in masks:
        masked._td[key] = value.clone()
        masked._td[key][len(data) - fillers :] = 0
    return masked
