"""Tokenizers with the special tokens and chat templates of public models, and small trained vocabularies."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "chat_templates"
# Pre-tokenization patterns. GPT-2 splits "\n\n" before a word into two tokens, Llama 3 does not.
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
    """Added tokens that are not registered as special."""
    words: str | None = LLAMA3
    """Pre-tokenization pattern; None: no pre-tokenization, as in SentencePiece, which writes ▁ for a space."""
    begins_with_space: bool = False
    rstrip: bool = False
    """Special tokens absorb the white space after them."""
    stops: list[str] = field(default_factory=list)
    """`eos_token_id` of the generation config: each of these tokens ends a turn."""
    end: str | None = None
    """End token that the template writes after an earlier assistant turn; None: the next role token ends it, if any."""
    call_end: str | None = None
    """End token after tool calls, if it differs from `end`."""
    separator: str = ""
    """Plain text that the template writes after an assistant turn if there is no end token."""
    format: str | None = None
    """Tool-call parser (`multi_turn.format`)."""
    calls: bool = True
    """The template supports tool calls."""
    several_calls: bool = True
    """A turn may contain several tool calls."""
    system: bool = True
    """The template has a system role."""
    thinking: tuple[str, ...] = ()
    """Supported thinking modes: `on`, `off` or both."""
    template: str | None = None
    """File name of the template; None: the name of the family."""


_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TOOLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_HEADER = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]
_INST = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
_RESULTS = ["[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
_TURNS = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
_PHI = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
_SENTENCE = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
_DEEPSEEK = [
    *_SENTENCE,
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
_GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
_ARGUMENTS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_KIMI = [
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
]
_HARMONY = [
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|call|>"),
]
_COMMAND = [
    *("<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>"),
    *("<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
]
_GRANITE = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"]
_IM_ENDS = ["<|im_end|>", "<|endoftext|>"]
_SWITCH = ("on", "off")
FAMILIES = {
    "qwen2_5": Family(_CHATML, "<|im_end|>", added=_TOOLS[:2], stops=_IM_ENDS, end="<|im_end|>", format="hermes"),
    "qwen2_5_plain_end": Family(
        ["<|endoftext|>", "<|im_start|>"],
        "<|endoftext|>",
        added=["<|im_end|>", *_TOOLS[:2]],
        stops=["<|endoftext|>", "<|im_end|>"],
        end="<|im_end|>",
        format="hermes",
        template="qwen2_5",
    ),
    "qwen3": Family(
        _CHATML, "<|im_end|>", added=_TOOLS, stops=_IM_ENDS, end="<|im_end|>", format="hermes", thinking=_SWITCH
    ),
    "qwen3_coder": Family(_CHATML, "<|im_end|>", added=_TOOLS, stops=_IM_ENDS, end="<|im_end|>", format="qwen3_coder"),
    "llama2": Family(
        ["<s>", "</s>"], "</s>", "<s>", words=None, begins_with_space=True, stops=["</s>"], end="</s>", calls=False
    ),
    "llama3": Family(
        _HEADER,
        "<|eot_id|>",
        "<|begin_of_text|>",
        stops=["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        end="<|eot_id|>",
        format="llama3_json",
        several_calls=False,
    ),
    "gemma2": Family(
        _TURNS,
        "<eos>",
        "<bos>",
        words=None,
        stops=["<eos>", "<end_of_turn>"],
        end="<end_of_turn>",
        system=False,
        calls=False,
    ),
    "gemma3": Family(
        _TURNS, "<eos>", "<bos>", words=None, stops=["<eos>", "<end_of_turn>"], end="<end_of_turn>", calls=False
    ),
    "smollm2": Family(
        _CHATML, "<|im_end|>", "<|im_start|>", words=GPT2, stops=["<|im_end|>"], end="<|im_end|>", calls=False
    ),
    "smollm3": Family(
        [*_HEADER, "<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
        added=_TOOLS,
        stops=["<|im_end|>", "<|end_of_text|>"],
        end="<|im_end|>",
        format="hermes",
        thinking=_SWITCH,
    ),
    "mistral": Family(
        [*_INST, *_RESULTS], "</s>", "<s>", words=None, begins_with_space=True, stops=["</s>"], end="</s>", system=False
    ),
    "mistral_nemo": Family([*_INST, *_RESULTS], "</s>", "<s>", stops=["</s>"], end="</s>"),
    "phi3": Family(
        _PHI,
        "<|endoftext|>",
        rstrip=True,
        words=None,
        begins_with_space=True,
        stops=["<|endoftext|>", "<|assistant|>", "<|end|>"],
        end="<|end|>",
        calls=False,
    ),
    "phi4": Family([*_CHATML, "<|im_sep|>"], "<|endoftext|>", stops=_IM_ENDS, end="<|im_end|>", calls=False),
    "deepseek_v2": Family(_SENTENCE, _SENTENCE[1], _SENTENCE[0], stops=[_SENTENCE[1]], end=_SENTENCE[1], calls=False),
    "deepseek_v3": Family(
        _DEEPSEEK, _SENTENCE[1], _SENTENCE[0], stops=[_SENTENCE[1]], end=_SENTENCE[1], format="deepseek"
    ),
    "deepseek_r1": Family(
        _DEEPSEEK,
        _SENTENCE[1],
        _SENTENCE[0],
        added=_TOOLS[4:],
        stops=[_SENTENCE[1]],
        end=_SENTENCE[1],
        format="deepseek",
        thinking=("on",),
    ),
    "glm4": Family(_GLM, "<|endoftext|>", stops=["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "glm4_5": Family(
        _GLM,
        "<|endoftext|>",
        added=[*_TOOLS, *_ARGUMENTS],
        stops=["<|endoftext|>", "<|user|>", "<|observation|>"],
        format="glm",
        thinking=_SWITCH,
    ),
    "kimi_k2": Family(_KIMI, "[EOS]", "[BOS]", stops=["<|im_end|>", "[EOS]"], end="<|im_end|>", format="kimi"),
    "gpt_oss": Family(
        _HARMONY,
        "<|return|>",
        "<|startoftext|>",
        stops=["<|return|>", "<|endoftext|>", "<|call|>"],
        end="<|end|>",
        call_end="<|call|>",
        format="openai",
        several_calls=False,
        thinking=("on",),
    ),
    "hermes": Family(
        [*_HEADER, "<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
        "<|begin_of_text|>",
        added=_TOOLS[:4],
        stops=["<|im_end|>", "<|end_of_text|>"],
        end="<|im_end|>",
        format="hermes",
    ),
    "command_r": Family(
        _COMMAND,
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
        stops=["<|END_OF_TURN_TOKEN|>", "<EOS_TOKEN>"],
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "command_r7b": Family(  # two tokens close an answer: the second ends generation
        [*_COMMAND, "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
        stops=["<|END_OF_TURN_TOKEN|>", "<EOS_TOKEN>"],
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "granite": Family(_GRANITE, "<|end_of_text|>", stops=["<|end_of_text|>"], end="<|end_of_text|>"),
    "olmo2": Family(
        ["<|endoftext|>"], "<|endoftext|>", "<|endoftext|>", stops=["<|endoftext|>"], end="<|endoftext|>", calls=False
    ),
    "zephyr": Family(["<s>", "</s>"], "</s>", "<s>", words=None, stops=["</s>"], end="</s>", calls=False),
    "vicuna": Family(["<s>", "</s>"], "</s>", "<s>", stops=["</s>"], separator="\n", format="hermes"),
}


def chat_tokenizer(family: str, words: str | None = "") -> Any:
    """A BPE tokenizer that can encode every string, with the special tokens and the template of a family.

    `words` replaces the family's pre-tokenization pattern ("": keep it; None: no pre-tokenization). Tests may set the
    chat template of the result; its tokens are shared.
    """
    return copy.copy(_trained_tokenizer(family, words))


@functools.cache
def _trained_tokenizer(family: str, words: str | None) -> Any:
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
        split = pre_tokenizers.Split(Regex(words), "isolated")
        raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        raw.decoder = decoders.ByteLevel()
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters, show_progress=False)
    text = (
        TEMPLATES / "qwen2_5.jinja"
    ).read_text() + "\n\n\n   Answer the result. Thought, user and tool. 0123456789\n" * 9
    raw.train_from_iterator(text.split("{%"), trainer)
    raw.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=kind.rstrip) for token in kind.special]
    )
    raw.add_tokens([AddedToken(token, special=False, normalized=False) for token in kind.added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=kind.bos, eos_token=kind.eos, pad_token=kind.special[0]
    )
    tokenizer.chat_template = (TEMPLATES / f"{kind.template or family}.jinja").read_text()
    return tokenizer
