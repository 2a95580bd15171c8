"""Malformed requests get errors in the dialect of their API and never a 5xx; other clients are served meanwhile."""

from __future__ import annotations

import copy
import http.client
import json
import random
import threading
import urllib.parse

import pytest

from tests.support.gateway_server import TEMPLATE, running_gateway
from verl.agent.gateway.anthropic import as_openai
from verl.inference.serving.api import ApiError

TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}
ASK = {"role": "user", "content": "How warm is it?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
OPENAI = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "20"},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}],
    "tool_choice": "auto",
    "temperature": 1.0,
    "top_p": 0.9,
    "max_tokens": 4,
    "stop": ["###"],
    "logprobs": True,
    "top_logprobs": 1,
    "logit_bias": {"7": 1.0},
    "seed": 3,
    "stream": False,
}
ANTHROPIC = {
    "model": "m",
    "max_tokens": 4,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bonn"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "20"}]},
    ],
    "tools": [{"name": "weather", "input_schema": TOOL}],
    "tool_choice": {"type": "auto"},
    "temperature": 0.5,
    "top_k": 5,
    "stop_sequences": ["###"],
    "stream": False,
    "thinking": {"type": "disabled"},
}
# JSON texts that replace a value of a valid request.
VALUES = (
    ["null", "true", "0", "-1", "1.5", '""', '"x"', "[]", "{}", "[null]", '{"a": {}}', '[["x"]]', "NaN", "-Infinity"]
    + [
        "1e999",
        "9" * 400,
        "-" + "9" * 5000,
        "1e-400",
        "18446744073709551616",
        r'"\ud800"',
        r'"\u0000"',
        '"' + "é" * 999,
    ]
    + ["[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, '"' + "x" * 3000 + '"', '"a" "b"']
)
SEEDS = range(12)
PER_SEED = 25


def mutated(seed, valid):
    """Bodies with one value replaced or removed, or a field added."""
    random_numbers = random.Random(seed)
    for _ in range(PER_SEED):
        request = copy.deepcopy(valid)
        parent, key = random_numbers.choice(list(places(request)))
        kind = random_numbers.choice(["replace"] * 6 + ["remove", "add", "cut"])
        value = random_numbers.choice(VALUES)
        if kind == "remove":
            del parent[key]
        elif kind == "add" and isinstance(parent, dict):
            parent["unknown_field"] = "@"
        else:
            parent[key] = "@"
        body = json.dumps(request).replace('"@"', value).encode()
        yield body[: random_numbers.randrange(len(body))] if kind == "cut" else body


def places(value):
    """(parent, key) of every value in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


@pytest.mark.parametrize(("path", "valid"), [("/v1/chat/completions", OPENAI), ("/v1/messages", ANTHROPIC)])
def test_malformed_requests_get_errors_of_their_api(path, valid):
    with running_gateway(lambda _: "Warm.") as gateway:
        url = urllib.parse.urlsplit(gateway.base_url("s"))
        connection = http.client.HTTPConnection(url.netloc)

        def post(body):
            connection.request("POST", url.path + path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

        assert post(json.dumps(valid).encode())[0] == 200
        rejected = 0
        for seed in SEEDS:
            for number, body in enumerate(mutated(seed, valid)):
                status, content = post(body)
                what = f"seed {seed}, request {number}: {status} {content}"[:500]
                assert status == 200 or 400 <= status < 500, what
                if status != 200:
                    rejected += 1
                    error = content["error"]
                    assert ("type" in content) == (path == "/v1/messages"), what
                    assert error["type"] == "invalid_request_error", what
                    assert error["message"], what
                    assert len(error["message"]) < 2000, what
        assert rejected > len(SEEDS) * PER_SEED / 2
        assert post(json.dumps(valid).encode())[0] == 200
        connection.close()


def test_a_message_that_cannot_fit_is_rejected_before_it_is_tokenised():
    with running_gateway(lambda _: "Warm.", max_model_len=100) as gateway:
        url = urllib.parse.urlsplit(gateway.base_url("s"))
        for length, status in ((60 * 2**20, 413), (1500, 400), (20_000, 400)):
            connection = http.client.HTTPConnection(url.netloc)
            body = json.dumps({"messages": [{"role": "user", "content": "x" * length}]})
            connection.request("POST", url.path + "/v1/chat/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = json.loads(response.read())
            connection.close()
            assert (response.status, content["error"]["code"]) == (status, "context_length_exceeded")
        assert max(map(len, gateway.model.tokenizer.texts), default=0) < 1600 * 2


@pytest.mark.processes
@pytest.mark.slow
def test_options_that_make_the_template_loop_do_not_block_other_clients():
    loops = "{% for i in range(n or 0) %}{% for j in range(n) %}{% endfor %}{% endfor %}" + TEMPLATE
    with running_gateway(lambda _: "Warm.", template=loops, text_seconds=2.0) as gateway:
        replies = []

        def post(name, **fields):
            url = urllib.parse.urlsplit(gateway.base_url(name))
            connection = http.client.HTTPConnection(url.netloc)
            body = json.dumps({"messages": [ASK], **fields})
            connection.request("POST", url.path + "/v1/chat/completions", body, {"Content-Type": "application/json"})
            replies.append((name, connection.getresponse().status))
            connection.close()

        thread = threading.Thread(target=post, args=("looping",), kwargs={"chat_template_kwargs": {"n": 99_999}})
        thread.start()
        while not gateway.sessions:
            pass
        post("other", chat_template_kwargs={"enable_thinking": False})
        thread.join(60)
        assert replies == [("other", 200), ("looping", 400)]


def test_a_user_message_without_blocks_is_rejected():
    with pytest.raises(ApiError) as error:
        as_openai({"model": "x", "max_tokens": 5, "messages": [{"role": "user", "content": []}]})
    assert error.value.status == 400
