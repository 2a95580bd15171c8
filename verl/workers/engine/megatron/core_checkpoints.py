"""Weights from a checkpoint that Megatron-Core itself wrote (`dist_checkpointing`), on any layout.

Core's own loader unpickles `.metadata`, `common.pt` and objects in the data files. Here the layout that Core describes
(which part of which tensor this rank has) is filled by `load_chunks`, which reads tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

from verl.types.weights import TensorSpec
from verl.workers.engine.common.checkpoint import stored_tensors
from verl.workers.engine.common.chunks import Chunk, load_chunks


def is_core_checkpoint(folder: Path) -> bool:
    """Whether Core wrote it; ours has a folder of its own for the model."""
    return folder.is_dir() and bool(dist_checkpointing.check_is_distributed_checkpoint(str(folder)))


@torch.no_grad()
def load_core_weights(models: Sequence[Any], optimizer: Any, folder: Path) -> None:
    """Into the chunks of a pipeline stage, and from there into the masters of Core's `optimizer`, if there is one.

    A collective, with the layout active. ValueError for weights that are not there.
    """
    parts = {f"model{number}": model.sharded_state_dict() for number, model in enumerate(models)}
    prepared, _, factories = load_preprocess(parts)
    tensors, _ = extract_matching_values(prepared, lambda value: isinstance(value, ShardedTensor))
    _read(list(nested_values(tensors)), folder)
    dict_list_map_inplace(lambda tensor: tensor.data, tensors)
    loaded = apply_factory_merges(tensors, factories)
    for number, model in enumerate(models):
        absent = model.load_state_dict(loaded[f"model{number}"], strict=False).missing_keys
        _refuse_missing(folder, {name for name in absent if not name.endswith("_extra_state")})
    if optimizer is not None:
        optimizer.reload_model_params()


def _read(tensors: Sequence[ShardedTensor], folder: Path) -> None:
    """Fill the tensors' data, in place."""
    stored = stored_tensors(folder)
    _refuse_missing(folder, {tensor.key for tensor in tensors if tensor.key not in stored})
    chunks = [chunk for tensor in tensors if (chunk := _chunk(tensor, stored[tensor.key])) is not None]
    first = {chunk.at: chunk for chunk in reversed(chunks)}
    load_chunks(first.values(), folder)
    for chunk in chunks:  # weights that two parts of the model share
        if chunk is not first[chunk.at]:
            chunk.tensor.copy_(first[chunk.at].tensor)


def _chunk(tensor: ShardedTensor, stored: TensorSpec) -> Chunk | None:
    """Where in the stored tensor this rank's part is; None where the stored one is shorter (padded vocabularies)."""
    data = tensor.data.view((1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))
    shape = tuple(tensor.global_shape)
    if tensor.allow_shape_mismatch and len(stored.shape) == len(shape):
        shape = stored.shape
        for dim, (offset, total) in enumerate(zip(tensor.global_offset, shape, strict=True)):
            data = data.narrow(dim, 0, max(0, min(data.shape[dim], total - offset)))
    return Chunk(tensor.key, shape, tuple(tensor.global_offset), data) if data.numel() else None


def _refuse_missing(folder: Path, names: set[str]) -> None:
    if names:
        raise ValueError(
            f"dist_checkpointing_path: {folder} has no {', '.join(sorted(names)[:4])} ({len(names)} weights are not "
            "there). Give a checkpoint of this model."
        )
