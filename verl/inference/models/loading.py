"""From a model folder to a model the engine can run: fused where the family allows it, else its own module."""

from __future__ import annotations

import logging
from typing import Any

import torch

from verl.config import ModelConfig
from verl.inference.models import InferenceModel
from verl.inference.models.fused import FusedModel, unsupported_reason
from verl.inference.models.generic import GenericModel
from verl.inference.tensor_parallel import SINGLE, TensorParallel
from verl.inference.weights import EngineWeights
from verl.models.loading import pretrained_model, read_config
from verl.utils.end_tokens import EndTokens, find_end_tokens
from verl.utils.tokenizer import tokenizer_if_any

__all__ = ["MODEL_KINDS", "end_tokens", "load_inference_model", "load_module", "read_model_config"]

logger = logging.getLogger(__name__)

MODEL_KINDS = ("auto", "fused", "generic")


def read_model_config(path: str, model_config: ModelConfig) -> Any:
    """The HF config with the overrides that training has too."""
    return read_config(path, model_config.trust_remote_code, model_config.override_config)


def load_inference_model(
    path: str,
    hf_config: Any,
    model_config: ModelConfig,
    max_length: int,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    kind: str = "auto",
    parallel: TensorParallel = SINGLE,
) -> InferenceModel:
    """The model on `device` in `dtype`. With load_format=dummy its weights are whatever; an update brings them."""
    foreign = model_config.trust_remote_code and getattr(hf_config, "auto_map", None)
    against = "its code comes with the checkpoint" if foreign else unsupported_reason(hf_config, max_length)
    if kind == "fused" and against:
        raise ValueError(
            f"engine_kwargs.native.model: fused cannot run this {hf_config.model_type} model: {against}. Set it to"
            " auto."
        )
    if parallel.size > 1 and (kind == "generic" or against):
        raise ValueError(
            f"tensor_model_parallel_size: {parallel.size}; only fused models run on several ranks, and this"
            f" {hf_config.model_type} is not one ({against or 'generic was asked for'}). Set it to 1."
        )
    if kind == "generic" or against:
        logger.info("rollout: %s runs by its own module (%s)", hf_config.model_type, against or "asked for")
        module = load_module(path, hf_config, model_config, load_format, device, dtype)
        return GenericModel(module, max_length, device, dtype)
    model = FusedModel(hf_config, max_length, dtype, device, parallel)
    if load_format != "dummy":
        module = pretrained_model(path, hf_config, "causal_lm", model_config.trust_remote_code)
        EngineWeights(model.named_weights(), model.region, dtype, model.shards(), parallel).load(module.state_dict())
    return model


def load_module(
    path: str,
    hf_config: Any,
    model_config: ModelConfig,
    load_format: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """The Hugging Face module: stored weights in host memory, or random ones of `dtype` on the device."""
    if load_format != "dummy":
        return pretrained_model(path, hf_config, "causal_lm", model_config.trust_remote_code)
    from transformers import AutoModelForCausalLM

    # Throw-away values must not shift anyone's random numbers.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, trust_remote_code=model_config.trust_remote_code
        )


def end_tokens(path: str, hf_config: Any, model_config: ModelConfig) -> EndTokens:
    """What ends an answer of this model unless a request says otherwise."""
    return find_end_tokens(path, hf_config, tokenizer_if_any(path, model_config.trust_remote_code))
