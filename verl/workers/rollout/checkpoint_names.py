"""Weights under the names of a checkpoint on disk, which is what engines of other make load."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verl.types.weights import Bucket

__all__ = ["checkpoint_tensors", "tied_names"]


def checkpoint_tensors(bucket: Bucket, skeleton: Any) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) as `save_pretrained` would write them; `skeleton` is the model on the meta device.

    transformers may hold in one tensor what a checkpoint has in many (the experts of a layer); these are views of it.
    Of tied weights the one under the first name is taken, whichever came.
    """
    from transformers.core_model_loading import revert_weight_conversion

    first = tied_names(skeleton)
    whole = {first.get(key, key): tensor for key, tensor in bucket.items() if isinstance(key, str)}
    return list(revert_weight_conversion(skeleton, whole).items())


def tied_names(module: nn.Module) -> dict[str, str]:
    """Of every weight the first name that it has."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
