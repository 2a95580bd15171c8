"""What a checkpoint of a model must hold, told from its folder without loading a weight."""

from __future__ import annotations

from typing import Any

import torch

from verl.models.loading import ModelKind, empty_model, read_config
from verl.models.lora import Adapters
from verl.workers.engine.common.same_model import ModelDescription, about
from verl.workers.engine.fsdp.model_weights import ModelWeights


def expected_model(path: str, kind: ModelKind, model_config: Any) -> ModelDescription:
    """Of the model at the local `path` as a trained FSDPEngine would have it, with `model_config`'s adapters."""
    config = read_config(path, model_config.trust_remote_code, model_config.override_config)
    hf = empty_model(config, kind, torch.float32, model_config.trust_remote_code)
    adapters = Adapters(hf, kind, model_config) if model_config.lora_rank > 0 else None
    stored = ModelWeights(hf, adapters, torch.device("meta")).stored()
    return ModelDescription.of(hf, stored, about(config, kind, None if adapters is None else adapters.about()))
