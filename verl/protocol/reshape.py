"""Batches in another shape: a second batch dimension and back, rows gathered into a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from verl.protocol.columns import TensorColumns
from verl.protocol.dataproto import DataProto, DataProtoItem
from verl.protocol.joins import concat_columns
from verl.utils.nested import object_array


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """[batch, …] → [new_batch_size, batch // new_batch_size, …] for tensors and object arrays."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise ValueError(f"fold_batch_dim: {len(data)} rows do not fold into {new_batch_size} rows.")
    return _reshaped(data, 1, (new_batch_size, len(data) // new_batch_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the first `batch_dims` dimensions of every column into one: the inverse of `fold_batch_dim`."""
    columns = [*data.tensors(), *data.non_tensor_batch.items()]
    for key, column in columns:
        if column.ndim < batch_dims or column.shape[:batch_dims] != columns[0][1].shape[:batch_dims]:
            raise ValueError(
                f"unfold_batch_dim: {key!r} has shape {tuple(column.shape)}, {columns[0][0]!r} has"
                f" {tuple(columns[0][1].shape)}; they must share their first {batch_dims} dimensions."
            )
    return _reshaped(data, batch_dims, (math.prod(columns[0][1].shape[:batch_dims]),)) if columns else data.select()


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """A DataProto of the given rows."""
    if len(items) == 0:
        raise ValueError("collate_fn: no items.")
    one_row = [
        {key: value[None] for key, value in item.batch.items()} if item.batch is not None else {} for item in items
    ]
    tensors = concat_columns(one_row, "collate_fn", "tensor")
    objects = [{key: object_array([value]) for key, value in item.non_tensor_batch.items()} for item in items]
    arrays = concat_columns(objects, "collate_fn", "non-tensor")
    return DataProto.from_dict(tensors, arrays, items[0].meta_info)


def _reshaped(data: DataProto, dims: int, rows: tuple[int, ...]) -> DataProto:
    """Every column with its first `dims` dimensions made `rows`."""
    td = None
    if data.batch is not None:
        tensors = {key: value.reshape(*rows, *value.shape[dims:]) for key, value in data.batch.items()}
        td = TensorColumns(tensors, batch_size=rows[:1], device=data.batch.device)
    arrays = {key: array.reshape(*rows, *array.shape[dims:]) for key, array in data.non_tensor_batch.items()}
    return DataProto(td, arrays, dict(data.meta_info))
