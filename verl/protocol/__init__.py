"""DataProto, the batch type exchanged between controller and workers, and functions on it: padding with filler rows,
folding the batch dimension, collating rows; DataProtoFuture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from verl.protocol.columns import TensorColumns, concat_columns, union_numpy_dict, union_tensor_dict
from verl.protocol.dataproto import DataProto, DataProtoConfig, DataProtoItem
from verl.utils.nested import object_array

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "collate_fn",
    "fold_batch_dim",
    "mask_filler_rows",
    "object_array",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

_Proto = TypeVar("_Proto", bound=DataProto)
_MASK_COLUMNS = ("response_mask", "loss_mask")


class DataProtoFuture:
    """The result of a non-blocking group call; `get()` waits for it."""

    def __init__(self, resolve: Callable[[], Any]) -> None:
        self._resolve: Callable[[], Any] | None = resolve
        self._value: Any = None

    def get(self) -> Any:
        """Wait for the result and return it; raises the exception of the call."""
        if self._resolve is not None:
            self._value = self._resolve()
            self._resolve = None
        return self._value

    @staticmethod
    def concat(data: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """The future of the concatenated results."""
        return DataProtoFuture(lambda: DataProto.concat([future.get() for future in data]))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Futures of the chunks of the result."""
        return [DataProtoFuture(lambda i=i: self.get().chunk(chunks)[i]) for i in range(chunks)]  # type: ignore[misc]


def pad_dataproto_to_divisor(data: _Proto, size_divisor: int) -> tuple[_Proto, int]:
    """Append copies of rows, from the first on, until `size_divisor` divides the length.

    Return the batch and the number of appended rows.
    """
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
        raise ValueError(f"unpad_dataproto: pad_size is {pad_size}; it must be between 0 and {len(data)}.")
    return data[: len(data) - pad_size] if pad_size else data


def mask_filler_rows(data: DataProto, num_fillers: int) -> DataProto:
    """Return the batch with response and loss masks of 0 in its last `num_fillers` rows, so that these rows do not
    affect the loss. The masks of `data` do not change.
    """
    masks = [(key, value) for key, value in data.tensors() if key in _MASK_COLUMNS]
    if not num_fillers or not masks:
        return data
    masked = data.select()
    for key, value in masks:
        masked._td[key] = value.clone()
        masked._td[key][len(data) - num_fillers :] = 0
    return masked


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape [batch, …] to [new_batch_size, batch // new_batch_size, …] for tensors and object arrays."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise ValueError(f"fold_batch_dim: {len(data)} rows cannot be folded into {new_batch_size} rows.")
    return _reshape(data, 1, (new_batch_size, len(data) // new_batch_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the first `batch_dims` dimensions of every column into one: the inverse of `fold_batch_dim`."""
    columns = [*data.tensors(), *data.non_tensor_batch.items()]
    for key, column in columns:
        if column.ndim < batch_dims or column.shape[:batch_dims] != columns[0][1].shape[:batch_dims]:
            raise ValueError(
                f"unfold_batch_dim: {key!r} has shape {tuple(column.shape)}, {columns[0][0]!r} has"
                f" {tuple(columns[0][1].shape)}; they must share their first {batch_dims} dimensions."
            )
    return _reshape(data, batch_dims, (math.prod(columns[0][1].shape[:batch_dims]),)) if columns else data.select()


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Combine rows into a DataProto; meta_info is that of the first row."""
    if len(items) == 0:
        raise ValueError("collate_fn: items is empty.")
    tensor_rows = [
        {key: value[None] for key, value in item.batch.items()} if item.batch is not None else {} for item in items
    ]
    tensors = concat_columns(tensor_rows, "collate_fn", "tensor")
    array_rows = [{key: object_array([value]) for key, value in item.non_tensor_batch.items()} for item in items]
    arrays = concat_columns(array_rows, "collate_fn", "non-tensor")
    return DataProto.from_dict(tensors, arrays, items[0].meta_info)


def _reshape(data: DataProto, num_dims: int, new_shape: tuple[int, ...]) -> DataProto:
    """Replace the first `num_dims` dimensions of every column by `new_shape`."""
    td = None
    if data.batch is not None:
        tensors = {key: value.reshape(*new_shape, *value.shape[num_dims:]) for key, value in data.batch.items()}
        td = TensorColumns(tensors, batch_size=new_shape[:1], device=data.batch.device)
    arrays = {key: array.reshape(*new_shape, *array.shape[num_dims:]) for key, array in data.non_tensor_batch.items()}
    return DataProto(td, arrays, dict(data.meta_info))
