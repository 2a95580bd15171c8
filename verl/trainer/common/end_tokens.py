"""End tokens of generated responses and of exported models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from verl.config import SFTConfig
from verl.config.rollout import GeneratorConfig
from verl.models.loading import read_config
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path

logger = logging.getLogger(__name__)


def response_end_tokens(
    model: Any, rollout: GeneratorConfig, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Return the token ids that end a response, and log them. `model`: configuration block of the model."""
    folder = resolve_model_path(model.path)
    hf_config = read_config(folder, model.trust_remote_code, model.override_config)
    end_tokens = find_end_tokens(folder, hf_config, tokenizer, template_kwargs, rollout.stop_token_ids)
    logger.info(end_tokens.describe(tokenizer, rollout.ignore_eos))
    return sorted(end_tokens.ids)


def generation_config_file(config: SFTConfig, tokenizer: object) -> dict[str, bytes]:
    """Return {"generation_config.json": content} with all end tokens; {} if the model's own file has all of them.

    The end token of a base model differs from that of chat responses: engines that read only this file would continue
    after the end of a response.
    """
    from transformers import GenerationConfig

    folder, model = resolve_model_path(config.model.path), config.model
    hf_config = read_config(folder, model.trust_remote_code, model.override_config)
    end_tokens = find_end_tokens(folder, hf_config, tokenizer, config.data.apply_chat_template_kwargs)
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # the model has none
        generation = GenerationConfig.from_model_config(hf_config)
    known = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    ids = [token for token in dict.fromkeys([*known, *sorted(end_tokens.ids)]) if token is not None]
    if ids == known:
        return {}
    generation.eos_token_id = ids
    return {"generation_config.json": generation.to_json_string().encode()}
