"""Write a gathered model to disk as transformers loads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.models.heads import ValueModel
from verl.workers.engine.common.safetensors_files import write_weights


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
    model.save_pretrained(folder, state_dict={})  # configs, and the code of a model that brings its own
    write_weights(_as_stored(model), folder)


def _as_stored(model: Any) -> dict[str, torch.Tensor]:
    """The weights as `save_pretrained` would store them: tied ones once, what is fused in memory taken apart."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(model._keys_to_ignore_on_save or ())
    state = {name: value for name, value in model.state_dict().items() if name not in ignored}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))


def _write_value_model(model: ValueModel, folder: Path) -> None:
    from transformers import AutoModelForTokenClassification

    write_weights(model.state_dict(), folder)
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
