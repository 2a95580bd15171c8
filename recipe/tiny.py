"""What the tiny versions of recipes are made of: a tokenizer of whole words, a model with random weights, rows on disk.

Each of them trains on a CPU in minutes with nothing to download; what such a model knows, it learned here.
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
    """One token per word and per run of signs; `tags` are tokens wherever they stand, and stay when ids are decoded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = dict.fromkeys([*SPECIAL, *tags, *words])
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=SPECIAL[4]))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return _tokenizer(raw, tags, chat_template)


def char_tokenizer(tags: Sequence[str], chat_template: str = CHAT_TEMPLATE) -> Any:
    """One token per character of ASCII, so that programs survive; `tags` are tokens wherever they stand."""
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
    """A Llama (`MODEL` but for `sizes`) that has learned nothing, with its tokenizer."""
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
    """As parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path
