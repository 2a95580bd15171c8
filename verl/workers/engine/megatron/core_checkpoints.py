"""Weights from a checkpoint that Megatron-Core itself wrote (`dist_checkpointing`), on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling


def is_core_checkpoint(folder: Path) -> bool:
    """Whether Core wrote it; ours has a folder of its own for the model."""
    return folder.is_dir() and bool(dist_checkpointing.check_is_distributed_checkpoint(str(folder)))


@torch.no_grad()
def load_core_weights(models: Sequence[Any], optimizer: Any, folder: Path) -> None:
    """Into the chunks of a pipeline stage, and from there into the masters of Core's `optimizer`, if there is one.

    A collective, with the layout active. ValueError for weights that are not there.
    """
    parts = {f"model{number}": model.sharded_state_dict() for number, model in enumerate(models)}
    found = dist_checkpointing.load(parts, str(folder), strict=StrictHandling.LOG_UNEXPECTED)
    for number, model in enumerate(models):
        loaded = {name: value for name, value in found[f"model{number}"].items() if isinstance(value, torch.Tensor)}
        absent = model.load_state_dict(loaded, strict=False).missing_keys
        missing = sorted(name for name in absent if not name.endswith("_extra_state"))
        if missing:
            raise ValueError(
                f"dist_checkpointing_path: {folder} has no {', '.join(missing[:4])} ({len(missing)} weights are not "
                "there). Give a checkpoint of this model."
            )
    if optimizer is not None:
        optimizer.reload_model_params()
