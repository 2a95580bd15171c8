"""Requests the server cannot serve as written: more tokens than the context has, formats its tokenizer cannot keep."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests.support.tiny import tiny_tokenizer
from verl.inference.constraints import OutputConstraints, json_grammar
from verl.inference.serving.api import ApiError
from verl.inference.serving.app import api_errors
from verl.inference.serving.openai_requests import CHAT, COMPLETIONS, HeavyRequest, ModelInfo, parse
from verl.types.request import SamplingParams

TOKENIZER = tiny_tokenizer()
CONTEXT = 40
MODEL_INFO = ModelInfo(
    ("tiny",), CONTEXT, 288, frozenset({1}), max_responses=8, client_templates=False, longest_token=20
)
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_PROMPT = len(TOKENIZER.encode("<|user|>hi<|end|><|assistant|>"))


def read(path, **fields):
    return parse(path, json.dumps(fields).encode(), MODEL_INFO, TOKENIZER)


@pytest.mark.parametrize(
    ("path", "prompt", "length", "name"),
    [
        (COMPLETIONS, {"prompt": "abc"}, 3, "max_tokens"),
        (COMPLETIONS, {"prompt": ["a", "abcde"]}, 5, "max_tokens"),
        (CHAT, {"messages": MESSAGES}, CHAT_PROMPT, "max_tokens"),
        (CHAT, {"messages": MESSAGES}, CHAT_PROMPT, "max_completion_tokens"),
    ],
)
def test_an_explicit_limit_that_does_not_fit_is_refused_never_truncated(path, prompt, length, name):
    room = CONTEXT - length
    ask = read(path, **prompt, **{name: room})
    assert min(request.params.max_new_tokens for request in ask.requests(CONTEXT)) == room
    with pytest.raises(ApiError) as caught:
        read(path, **prompt, **{name: room + 1})
    error = caught.value.content["error"]
    assert (caught.value.status, error["param"], error["code"]) == (400, name, "context_length_exceeded")
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert f"at most {room}" in error["message"]


def test_a_default_limit_is_what_the_context_leaves():
    assert read(COMPLETIONS, prompt="abc").requests(CONTEXT)[0].params.max_new_tokens == 16
    assert read(COMPLETIONS, prompt="a" * 30).requests(CONTEXT)[0].params.max_new_tokens == CONTEXT - 30
    assert read(CHAT, messages=MESSAGES).requests(CONTEXT)[0].params.max_new_tokens == CONTEXT - CHAT_PROMPT


def test_scoring_a_prompt_needs_no_more_room_than_before():
    ask = read(COMPLETIONS, prompt="a" * 39, echo=True, logprobs=0, max_tokens=0)
    assert ask.scores_only
    assert ask.requests(CONTEXT)[0].params.max_new_tokens == 1


@pytest.mark.parametrize(
    ("fields", "heavy"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False, "date": None}}, False),
        ({"chat_template_kwargs": {"n": 99_999}}, True),  # may be the length of a loop in the model's template
        ({"chat_template_kwargs": {"chat_template": "x"}}, True),
        ({"chat_template": "x"}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
def test_requests_that_may_run_long_are_parsed_apart_from_the_others(fields, heavy):
    body = json.dumps({"messages": MESSAGES, **fields}).encode()
    with pytest.raises(HeavyRequest) if heavy else contextlib.nullcontext():
        parse(CHAT, body, MODEL_INFO, TOKENIZER, heavy=False)


def without_decoder():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


@pytest.mark.parametrize("tokenizer", [without_decoder, lambda: object()], ids=["no decoder", "not a fast tokenizer"])
def test_a_tokenizer_that_cannot_follow_a_grammar_is_refused_with_cause_and_remedy(tokenizer):
    pytest.importorskip("llguidance")
    params = SamplingParams(grammar=json_grammar({"type": "object"}), eos_token_ids=frozenset({1}))
    with pytest.raises(ApiError) as caught, api_errors("response_format"):
        OutputConstraints(tokenizer).prepare(params)
    error = caught.value.content["error"]
    assert (caught.value.status, error["param"]) == (400, "response_format")
    assert "decoder" in error["message"]
    assert "Remove it" in error["message"]
