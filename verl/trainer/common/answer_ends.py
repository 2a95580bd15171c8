"""What ends an answer of a run, said once in its log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from verl.config.rollout import GeneratorConfig
from verl.models.loading import read_config
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path

logger = logging.getLogger(__name__)


def answer_ends(model: Any, rollout: GeneratorConfig, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids that end an answer of this model; `model` and `rollout` are blocks of the configuration."""
    folder = resolve_model_path(model.path)
    hf_config = read_config(folder, model.trust_remote_code, model.override_config)
    found = find_end_tokens(folder, hf_config, tokenizer, template_kwargs, rollout.stop_token_ids)
    logger.info(found.described(tokenizer, rollout.ignore_eos))
    return sorted(found.ids)
