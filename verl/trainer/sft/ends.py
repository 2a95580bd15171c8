"""Where answers of a fine-tuned model end, told to whoever generates with it."""

from __future__ import annotations

from verl.config import SFTConfig
from verl.models.loading import read_config
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path


def learned_ends(config: SFTConfig, tokenizer: object) -> dict[str, bytes]:
    """generation_config.json with all end tokens, by its name; {} where the model's own names them already.

    A base model ends texts with another token than the answers of a chat: engines that read only this file would go on
    after an answer.
    """
    from transformers import GenerationConfig

    folder, model = resolve_model_path(config.model.path), config.model
    hf_config = read_config(folder, model.trust_remote_code, model.override_config)
    found = find_end_tokens(folder, hf_config, tokenizer, config.data.apply_chat_template_kwargs)
    try:
        made = GenerationConfig.from_pretrained(folder)
    except OSError:  # it has none
        made = GenerationConfig.from_model_config(hf_config)
    known = made.eos_token_id if isinstance(made.eos_token_id, list) else [made.eos_token_id]
    ends = [end for end in dict.fromkeys([*known, *sorted(found.ids)]) if end is not None]
    if ends == known:
        return {}
    made.eos_token_id = ends
    return {"generation_config.json": made.to_json_string().encode()}
