"""Tiny models with random weights and a byte-level tokenizer, created offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]

# AdamW divides a gradient by its magnitude: with torch's default of 1e-8 a gradient of pure rounding noise becomes a
# full step of either sign. This eps keeps such steps negligible, so weights can be compared (see CONTRIBUTING.md).
STEADY_EPS = 1e-3


def tiny_tokenizer() -> Any:
    """A byte-level tokenizer without merges: every string round-trips. Token 0 is padding, token 1 `<|end|>` is eos."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(family: str = "qwen2", **changes: Any) -> Any:
    """A config of about 100k parameters; `family` is a transformers model type."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model(family, **{**sizes, **changes})


def tiny_model(family: str = "qwen2", seed: int = 0, **changes: Any) -> Any:
    """A causal LM with random fp32 weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(family, **changes)).float().eval()


def save_tiny_model(folder: Path, family: str = "qwen2", seed: int = 0, **changes: Any) -> Path:
    """Save weights and tokenizer in a folder for `from_pretrained`."""
    tiny_model(family, seed, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
