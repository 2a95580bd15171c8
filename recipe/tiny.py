"""Parts of the tiny versions of recipes: word and character tokenizers, a model with random weights, parquet files.

The tiny versions train on a CPU in minutes without downloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}<|end|>"
    "{% else %}<|user|> {{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


def word_tokenizer(words: Iterable[str], tags: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE) -> Any:
    """One token per word and per sequence of signs; each tag is one token and is kept when ids are decoded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = dict.fromkeys([*SPECIAL, *tags, *words])
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=SPECIAL[4]))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return _tokenizer(raw, tags, chat_template)


def char_tokenizer(tags: Sequence[str], chat_template: str = CHAT_TEMPLATE) -> Any:
    """One token per ASCII character, so that programs are encoded exactly; each tag is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = [*SPECIAL, *tags, "\n", *map(chr, range(32, 127))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=SPECIAL[4]))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return _tokenizer(raw, tags, chat_template)


def _tokenizer(raw: Any, tags: Sequence[str], chat_template: str) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    raw.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=SPECIAL[4]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_random_model(folder: Path, tokenizer: Any, seed: int, positions: int, **sizes: Any) -> Path:
    """Save a Llama model with random weights (`MODEL`, changed by `sizes`) and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    shape = {**MODEL, "max_position_embeddings": positions, **sizes}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **ids, **shape)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as parquet; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path
