"""Read a LoRA adapter in peft's format: adapter_config.json and adapter_model.safetensors. No code is executed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["AdapterFile", "read_adapter"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings of peft that change what an adapter computes, and the values that are supported.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "alpha_pattern": ({}, None),
    "rank_pattern": ({}, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


@dataclass(frozen=True)
class AdapterFile:
    """An adapter in host memory."""

    rank: int
    tensors: dict[str, torch.Tensor]
    """`<layer>.lora_A.weight` [rank, inputs] and `<layer>.lora_B.weight` [outputs, rank], which includes the scale."""


def read_adapter(folder: str) -> AdapterFile:
    """Read the adapter in `folder`, which may also be a checkpoint's step or role that contains `lora_adapter`.

    ValueError if files are missing or the adapter uses a feature that the engine does not support.
    """
    path = _find_folder(folder)
    try:
        settings = json.loads((path / _CONFIG).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"lora_path: {path / _CONFIG} cannot be read: {error}") from error
    rank, scale = _rank_and_scale(path, settings)
    return AdapterFile(rank, _read_tensors(path, rank, scale))


def _find_folder(folder: str) -> Path:
    path = Path(folder).expanduser()
    for candidate in (path, path / "lora_adapter", path / "actor" / "lora_adapter"):
        if (candidate / _CONFIG).is_file():
            if not (candidate / _WEIGHTS).is_file():
                raise ValueError(f"lora_path: {candidate} has no {_WEIGHTS}; other formats are not loaded.")
            return candidate
    raise ValueError(f"lora_path: {folder!r} is not a folder with {_CONFIG} on this machine.")


def _rank_and_scale(path: Path, settings: Any) -> tuple[int, float]:
    if not isinstance(settings, dict):
        raise ValueError(f"lora_path: {path / _CONFIG} is not an object.")
    for key, allowed in _SUPPORTED.items():
        if key in settings and settings[key] not in allowed:
            raise ValueError(f"lora_path: {path / _CONFIG} has {key} = {settings[key]!r}, which is not supported.")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"lora_path: {path / _CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}.")
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _read_tensors(path: Path, rank: int, scale: float) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(path / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"lora_path: {path / _WEIGHTS} cannot be read: {error}") from error
    tensors = {}
    for name, tensor in stored.items():
        plain = name.removeprefix(_PREFIX)
        is_up = plain.endswith(".lora_B.weight")
        if not (is_up or plain.endswith(".lora_A.weight")) or tensor.ndim != 2:
            raise ValueError(f"lora_path: {name!r} is not a matrix of a linear layer's adapter.")
        if tensor.shape[1 if is_up else 0] != rank:
            raise ValueError(f"lora_path: {name!r} is {list(tensor.shape)}, but {_CONFIG} has r = {rank}.")
        if not tensor.isfinite().all():
            raise ValueError(f"lora_path: {name!r} has values that are not finite.")
        tensors[plain] = tensor.float() * scale if is_up else tensor
    if not tensors:
        raise ValueError(f"lora_path: {path / _WEIGHTS} has no tensors.")
    return tensors
