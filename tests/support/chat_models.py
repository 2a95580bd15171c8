"""Tokenizers with the chat templates of public models, their words learned from a few sentences."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "chat_templates"
# How texts are cut into words: GPT-2's way parts a line break from the next one if a word follows, Llama 3's does not.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    special: list[str]
    eos: str
    bos: str | None = None
    added: list[str] = field(default_factory=list)
    """Tokens that are no special ones."""
    words: str | None = LLAMA3
    """None: no words, as SentencePiece, which writes ▁ for a space."""
    begins_with_space: bool = False


_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TOOLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_HEADER = [
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]
_INST = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
_TURNS = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
FAMILIES = {
    "qwen2_5": Family(_CHATML, "<|im_end|>", added=_TOOLS[:2]),
    "qwen3": Family(_CHATML, "<|im_end|>", added=_TOOLS),
    "llama3": Family(_HEADER, "<|eot_id|>", "<|begin_of_text|>"),
    "gemma3": Family(_TURNS, "<eos>", "<bos>", words=None),
    "smollm2": Family(_CHATML, "<|im_end|>", "<|im_start|>", words=GPT2),
    "mistral": Family([*_INST, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], "</s>", "<s>", words=None, begins_with_space=True),
}


@functools.cache
def chat_tokenizer(family: str, words: str | None = "") -> Any:
    """The family's special tokens and template over a small byte-pair vocabulary that can write every string.

    `words` replaces the family's way to cut texts.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    kind = FAMILIES[family]
    words = kind.words if words == "" else words
    raw = Tokenizer(models.BPE(byte_fallback=words is None))
    if words is None:
        begin = [normalizers.Prepend("▁")] if kind.begins_with_space else []
        raw.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
        raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=every_byte, show_progress=False)
    else:
        cut = pre_tokenizers.Split(Regex(words), "isolated")
        raw.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
        raw.decoder = decoders.ByteLevel()
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters, show_progress=False)
    text = (TEMPLATES / "qwen2_5.jinja").read_text() + "\n\n\n   Answer the result. Thought, user and tool.\n" * 9
    raw.train_from_iterator(text.split("{%"), trainer)
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in kind.special])
    raw.add_tokens([AddedToken(token, special=False, normalized=False) for token in kind.added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=kind.bos, eos_token=kind.eos, pad_token=kind.special[0]
    )
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer
