"""The gateway with every model family: no reply contains an end token, and contexts continue as the template writes."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.chat_models import FAMILIES, chat_tokenizer
from tests.support.family_turns import TOOL, TOOLS, USER, Conversation, all_cases, template_kwargs
from verl.agent.gateway.app import GatewayApp
from verl.agent.gateway.session import GatewaySession, Model, Sessions
from verl.inference.serving.openai_requests import ModelInfo
from verl.types.request import Output
from verl.utils.tool_calls import get_parser

CASES = [case for case in all_cases() if case.end and (FAMILIES[case.family].format or not case.tools)]


class Gateway:
    """The application called in this process; the model says `turns`, a token at a time."""

    def __init__(self, case):
        kind, self.tokenizer = FAMILIES[case.family], chat_tokenizer(case.family)
        stops = frozenset(self.tokenizer.convert_tokens_to_ids(kind.stops))
        model_info = ModelInfo(("m",), 4096, len(self.tokenizer), stops, 1, False, 32)
        parser = get_parser(kind.format or "hermes")
        self.prompts, self.turns = [], []
        sessions = Sessions(lambda name: GatewaySession(name, self.generate))
        self.app = GatewayApp(
            sessions, Model(model_info, self.tokenizer, parser, template_kwargs(case.family, case.thinking))
        )

    async def generate(self, request):
        self.prompts.append(list(request.prompt_ids))
        ids = self.turns.pop(0)
        for place, token in enumerate(ids):
            yield Output([token], [-0.5], [1], "stop" if place == len(ids) - 1 else "", [-0.5], [-0.5])

    async def post(self, messages, **body):
        events, sent = [{"type": "http.request", "body": json.dumps({"messages": messages, **body}).encode()}], []

        async def receive():
            return events.pop() if events else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        path = "/sessions/a~secret/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await self.app(scope, receive, send)
        assert sent[0]["status"] == 200, sent
        return json.loads(b"".join(message.get("body", b"") for message in sent))["choices"][0]


async def talk(case):
    """A tool call, or a plain answer, and two plain answers; expected and real prompts, and the replies."""
    gateway, conversation = Gateway(case), Conversation(case)
    body = {"tools": TOOLS} if case.tools else {}
    expected, replies, messages = [], [], list(conversation.messages)
    for number in range(3):
        results = TOOL if case.tools and number == 0 else USER
        turn, last_words, message = conversation.model_turn(number, results)
        before = conversation.encode(conversation.text)
        expected.append(before)
        gateway.turns.append(
            conversation.encode(conversation.text + turn)[len(before) :] + conversation.encode(case.end)
        )
        choice = await gateway.post(messages, **body)
        replies.append(choice)
        reply = {key: value for key, value in choice["message"].items() if value is not None}
        results = [dict(result) for result in results]
        for result in results:
            if result["role"] == "tool":
                result["tool_call_id"] = reply["tool_calls"][0]["id"]
        messages += [reply, *results]
        conversation.add(turn, last_words, message, results, case.end)
    return expected, gateway.prompts, replies


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_reply_contains_an_end_token_and_contexts_continue_exactly(case):
    expected, prompts, replies = asyncio.run(talk(case))
    for number, choice in enumerate(replies):
        message, content = choice["message"], choice["message"]["content"] or ""
        assert not any(stop in content for stop in FAMILIES[case.family].stops)
        if case.tools and number == 0:
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "Fine 0 city"}
            assert choice["finish_reason"] == "tool_calls"
        else:
            assert not message.get("tool_calls")
            assert content.strip().endswith(f"Fine {number}.")
            assert choice["finish_reason"] == "stop"
    assert prompts == expected
