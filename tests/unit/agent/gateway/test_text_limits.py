"""Limits of the gateway's text work: what cannot fit is refused untokenised, what is long runs in text workers."""

from __future__ import annotations

import asyncio
import json
from pickle import PickleBuffer

import pytest

from tests.support.gateway_server import END, CountingTokenizer
from verl.agent.gateway import session as session_module
from verl.agent.gateway.requests import MESSAGES, check_body
from verl.agent.gateway.session import GatewaySession, Model
from verl.inference.serving.api import ApiError
from verl.inference.serving.openai_requests import CHAT, ModelInfo
from verl.utils.tool_calls import get_parser

CONTEXT, LONGEST = 1000, 16
MODEL_INFO = ModelInfo(("tiny",), CONTEXT, 264, frozenset({END}), 1, False, LONGEST)


def user(text):
    return {"role": "user", "content": text}


def body(*messages, **fields):
    return json.dumps({"messages": list(messages), **fields}).encode()


class Inline:
    """Text workers that run in this process and record what they run."""

    def __init__(self, *_, **__):
        self.calls = []

    async def call(self, function, *arguments, heavy=False):
        self.calls.append(function.__name__)
        received = [bytes(item) if isinstance(item, PickleBuffer) else item for item in arguments]
        return function(self.tokenizer, *received)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(session_module, "TextWorkers", Inline)
    made = Model(MODEL_INFO, CountingTokenizer(), get_parser("hermes"))
    made.workers.tokenizer = made.tokenizer
    return made


def add_request(model, text, session=None, **fields):
    async def run():
        request = await model.read(CHAT, body(user(text), **fields))
        return await (session or GatewaySession("s", None)).add_request(request, model)

    return asyncio.run(run())


@pytest.mark.parametrize(("api", "more"), [(CHAT, {}), (MESSAGES, {"max_tokens": 5})])
def test_a_conversation_that_cannot_fit_is_refused_untokenised(model, api, more):
    too_long = CONTEXT * LONGEST + 1
    with pytest.raises(ApiError, match=r"16023 characters.*\b16000\b.*--max-model-len") as refused:
        asyncio.run(model.read(api, body(user("x" * too_long), **more)))
    assert (refused.value.status, refused.value.content["error"]["code"]) == (400, "context_length_exceeded")
    many = [user("x" * 100)] * (too_long // 100)
    with pytest.raises(ApiError, match=r"18884 characters.*\b16000\b.*--max-model-len"):
        asyncio.run(model.read(api, body(*many, **more)))
    assert model.tokenizer.texts == []


def test_a_body_that_cannot_fit_is_refused_unread():
    most = CONTEXT * LONGEST * 12 + 2**20
    check_body(b"x" * most, MODEL_INFO)
    with pytest.raises(ApiError, match=rf"{most + 1} bytes.*\b1000 tokens.*\b{most}\b") as refused:
        check_body(b"x" * (most + 1), MODEL_INFO)
    assert refused.value.status == 413


def test_short_texts_stay_in_the_process_and_long_ones_go_to_workers(model, monkeypatch):
    first = add_request(model, "hello")
    assert model.workers.calls == []
    monkeypatch.setattr(session_module, "SHORT_BODY_BYTES", 10)
    monkeypatch.setattr(session_module, "SHORT_TEXT", 10)
    assert add_request(model, "hello").context_ids == first.context_ids
    assert model.workers.calls == ["read_request", "prompt_ids"]


def test_a_grammar_is_compiled_in_a_worker(model):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    with pytest.raises(ApiError, match=r"response_format.*tokenizer\.json"):  # which the one that counts is not
        add_request(model, "hello", response_format=form)
    assert model.workers.calls == ["read_request"]
    without = Model(MODEL_INFO, model.tokenizer, get_parser("hermes"), grammars=False)
    without.workers.tokenizer = model.tokenizer
    add_request(without, "hello", response_format=form)
    assert without.workers.calls == ["read_request"]


def test_a_request_that_is_sent_twice_at_once_has_one_place(model):
    session = GatewaySession("s", None)

    async def run():
        requests = [await model.read(CHAT, body(user("hello"))) for _ in range(2)]
        return await asyncio.gather(*(session.add_request(request, model) for request in requests))

    first, second = asyncio.run(run())
    assert first is second
    assert session.tree.counts == {"start": 1, "retry": 1}


def test_the_options_of_a_template_are_limited(model):
    with pytest.raises(ApiError, match=r"20025 characters.*\b16000\b.*--max-model-len"):
        asyncio.run(model.read(CHAT, body(user("x"), chat_template_kwargs={"a": "b" * 20_000})))
