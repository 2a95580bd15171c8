"""DataProto, the one thing that travels between controller and workers, and functions on it."""

from verl.protocol.dataproto import DataProto, DataProtoConfig, DataProtoItem
from verl.protocol.future import DataProtoFuture
from verl.protocol.joins import union_numpy_dict, union_tensor_dict
from verl.protocol.padding import mask_filler_rows, pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol.reshape import collate_fn, fold_batch_dim, unfold_batch_dim
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
