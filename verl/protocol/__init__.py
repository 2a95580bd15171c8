"""DataProto, the batch type exchanged between controller and workers, and functions on it."""

from verl.protocol.columns import union_numpy_dict, union_tensor_dict
from verl.protocol.dataproto import DataProto, DataProtoConfig, DataProtoItem
from verl.protocol.operations import (
    DataProtoFuture,
    collate_fn,
    fold_batch_dim,
    mask_filler_rows,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
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
