"""Write a gathered model to disk as transformers loads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.models.heads import ValueModel


def write_hf_model(skeleton: nn.Module, state: Mapping[str, torch.Tensor], folder: Path, source: str = "") -> None:
    """`skeleton` is the empty model, `state` its whole weights (tied ones once), `source` where it was loaded from.

    A value model is written as a token classifier with one label.
    """
    skeleton.load_state_dict(state, strict=False, assign=True)
    if isinstance(skeleton, ValueModel):
        _write_value_model(skeleton, folder)
        return
    model: Any = skeleton
    model.tie_weights()
    generation = _generation_config(source)
    if generation is not None and model.can_generate():
        model.generation_config = generation
    model.save_pretrained(folder)


def _write_value_model(model: ValueModel, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForTokenClassification

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = type(model.config).from_dict(model.config.to_dict())
    config.num_labels = 1
    classifier = AutoModelForTokenClassification._model_mapping.get(type(config), None)
    config.architectures = [classifier.__name__] if classifier is not None else None
    config.save_pretrained(folder)


def _generation_config(source: str) -> Any:
    from transformers import GenerationConfig

    if not (Path(source) / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(source)
