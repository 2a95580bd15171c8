"""Attacks on the inference server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.attacks.support import protocol, requests
from tests.attacks.support.attack import HARMLESS, OVERLOADED, REJECTED, Attack, Pause, Repeated, Reset, http_request
from tests.attacks.support.keys import API_KEY, bearer

__all__ = ["COMMON_NUMBERS", "REJECTED_NUMBERS", "connections", "grammar_attacks", "malicious_requests", "text_attacks"]

COMMON_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias.65",
    "stop_token_ids.0",
)
_TOO_LARGE = ("1e38", "3.5e38", "1e308")
REJECTED_NUMBERS = {
    # A logit divided by such a temperature is not finite in float32.
    "temperature": ("minus-1", "1e-40", "1e-320"),
    "top_p": ("minus-1", "1.5", *_TOO_LARGE),
    "min_p": ("minus-1", "1.5", *_TOO_LARGE),
    "max_tokens": ("minus-1", "0", "1.5", "1e-40", "1e308"),
    "n": ("minus-1", "0", "1.5", "2**31", "2**63", "2**64-1"),
    "repetition_penalty": ("minus-1", "0"),
    "presence_penalty": _TOO_LARGE,
    "frequency_penalty": _TOO_LARGE,
    "logit_bias.65": ("2**31", *_TOO_LARGE),
    "stop_token_ids.0": ("minus-1", "1.5", "2**31", "2**63", "2**64-1"),
}
_SHORT = {"model": "tiny", "max_tokens": 2, "logit_bias": {}, "stop_token_ids": [5]}
COMPLETIONS = requests.Endpoint(
    "/v1/completions",
    {**_SHORT, "prompt": "hello"},
    numbers=(*COMMON_NUMBERS, "logprobs", "prompt_logprobs"),
    texts=("prompt", "model", "stop"),
    others=("prompt", "stop", "logit_bias", "stop_token_ids", "stream", "echo", "stream_options", "response_format"),
    rejected=REJECTED_NUMBERS,
    headers=bearer(API_KEY),
)
CHAT = requests.Endpoint(
    "/v1/chat/completions",
    {**_SHORT, "messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    numbers=(*COMMON_NUMBERS, "max_completion_tokens", "top_logprobs"),
    texts=("messages.0.content", "messages.0.role", "chat_template"),
    others=("messages", "tools", "tool_choice", "chat_template_kwargs", "response_format", "stop", "logprobs"),
    rejected=REJECTED_NUMBERS,
    headers=bearer(API_KEY),
)
TEMPLATES = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "huge": "{{ 'x' * 9000000000 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "recursive": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "include": "{% include '/etc/passwd' %}",
    "syntax": "{% for %}",
    "long-output": "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "nested": "{% if true %}" * 2_000 + "x" + "{% endif %}" * 2_000,
    "exception": "{{ raise_exception('x' * 1000000) }}",
    "undefined": "{{ a.b.c }}",
}


def malicious_requests(seed: int) -> Iterator[Attack]:
    rng = random.Random(seed)
    for endpoint in (COMPLETIONS, CHAT):
        yield from requests.field_attacks(endpoint)
        yield from requests.large_attacks(endpoint)
        yield from requests.body_attacks(endpoint)
        yield from requests.authentication_attacks(endpoint)
        yield from requests.random_attacks(endpoint, rng, 60)
    yield from requests.header_attacks(CHAT)
    yield from protocol.framing_attacks(COMPLETIONS)
    yield from text_attacks(CHAT)
    yield from grammar_attacks(CHAT)
    for kind, template in TEMPLATES.items():
        yield _chat(CHAT, f"template {kind}", chat_template=template)
        yield _chat(CHAT, f"template-kwargs {kind}", chat_template_kwargs={"chat_template": template})
    yield from _completions()


def connections() -> Iterator[Attack]:
    for endpoint in (COMPLETIONS,):
        yield from protocol.slow_attacks(endpoint)
        yield from protocol.flood_attacks(endpoint)


def text_attacks(endpoint: requests.Endpoint) -> Iterator[Attack]:
    """Long and strange conversations; works for every endpoint with `messages`."""
    head = json.dumps({key: value for key, value in endpoint.valid.items() if key != "messages"}).encode()[:-1]
    message = b'{"role": "user", "content": "x"},'
    million = Repeated(head + b', "messages": [', message, 240_000, message[:-1] + b"]}")
    yield requests.post(endpoint, "messages 240000", million, REJECTED | {"503"})
    words = Repeated(head + b', "messages": [{"role": "user", "content": "', b"apple pear ", 500_000, b'"}]}')
    yield requests.post(endpoint, "message million-words", words, REJECTED | {"503"})
    parts = b'{"type": "text", "text": "x"},'
    many_parts = Repeated(head + b', "messages": [{"role": "user", "content": [', parts, 200_000, parts[:-1] + b"]}]}")
    yield requests.post(endpoint, "message 200000-parts", many_parts, REJECTED | {"503"})
    image = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    yield _chat(endpoint, "message image", REJECTED, messages=[{"role": "user", "content": image}])
    stop = [f"s{number}" for number in range(100_000)]
    key = "stop_sequences" if "messages" in endpoint.path.rsplit("/", 1)[-1] else "stop"
    yield _chat(endpoint, "stop 100000", REJECTED, **{key: stop})
    yield _chat(endpoint, "stop long", **{key: ["x" * 1_000_000]})


def grammar_attacks(endpoint: requests.Endpoint) -> Iterator[Attack]:
    """Schemas that are expensive to compile or to follow."""
    for kind, schema in _schemas().items():
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        yield _chat(endpoint, f"schema {kind}", response_format=form)
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
        yield _chat(endpoint, f"tool-schema {kind}", tools=[tool], tool_choice="required")
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    yield _chat(endpoint, "tools 20000", tools=[function] * 20_000)
    yield _chat(endpoint, "tools long-name", tools=[{"type": "function", "function": {"name": "f" * 1_000_000}}])


def _schemas() -> dict[str, Any]:
    exponential = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)} | {
        "d30": {"type": "null"}
    }
    product = {f"d{n}": _pair(f"d{n + 1}") for n in range(30)} | {"d30": {"type": "null"}}
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return {
        "exponential-refs": {"$defs": exponential, "$ref": "#/$defs/d0"},
        "exponential-objects": {"$defs": product, "$ref": "#/$defs/d0"},
        "self-reference": {"$ref": "#"},
        "mutual-reference": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "remote-reference": {"$ref": "http://127.0.0.1:9/x.json"},
        "file-reference": {"$ref": "file:///etc/passwd"},
        "missing-reference": {"$ref": "#/$defs/none"},
        "deep": deep,
        "catastrophic-pattern": {"type": "string", "pattern": "^(a+)+$"},
        "alternations-pattern": {"type": "string", "pattern": "(a|aa|aaa|b)*" * 20},
        "counted-pattern": {"type": "string", "pattern": "((a{1,500}){1,500}){1,500}"},
        "invalid-pattern": {"type": "string", "pattern": "(((("},
        "lookbehind-pattern": {"type": "string", "pattern": "(?<=a)b(?!c)\\1"},
        "unicode-pattern": {"type": "string", "pattern": "\\p{L}{1,1000}"},
        "many-values": {"enum": [f"value-{number}" for number in range(20_000)]},
        "many-properties": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3_000)}},
        "many-required": {
            "type": "object",
            "properties": {f"p{n}": {} for n in range(500)},
            "required": [f"p{n}" for n in range(500)],
        },
        "many-items": {"type": "array", "minItems": 10**9, "items": {"type": "null"}},
        "long-text": {"type": "string", "minLength": 10**9},
        "large-range": {"type": "integer", "minimum": -(10**18), "maximum": 10**18, "multipleOf": 7919},
        "any-of-many": {"anyOf": [{"type": "string", "pattern": f"^a{{{n}}}b*$"} for n in range(300)]},
        "all-of-many": {"allOf": [{"type": "string", "pattern": f"a{{{n}}}"} for n in range(40)]},
        "wrong-types": {"type": ["x", 1, None], "properties": [], "required": 1},
        "boolean": True,
    }


def _pair(name: str) -> dict[str, Any]:
    reference = {"$ref": f"#/$defs/{name}"}
    return {"type": "object", "properties": {"a": reference, "b": reference}, "required": ["a", "b"]}


def _chat(endpoint: requests.Endpoint, name: str, allowed: frozenset[str] = HARMLESS, **fields: Any) -> Attack:
    return requests.post(endpoint, name, json.dumps({**endpoint.valid, **fields}).encode(), allowed)


def _completions() -> Iterator[Attack]:
    def complete(name: str, allowed: frozenset[str] = HARMLESS, **fields: Any) -> Attack:
        return requests.post(COMPLETIONS, name, json.dumps({**COMPLETIONS.valid, **fields}).encode(), allowed)

    tokens = Repeated(b'{"max_tokens": 1, "prompt": [', b"65,", 1_000_000, b"65]}")
    yield requests.post(COMPLETIONS, "prompt million-tokens", tokens, REJECTED)
    prompts = Repeated(b'{"max_tokens": 1, "prompt": [', b'"x",', 1_000_000, b'"x"]}')
    yield requests.post(COMPLETIONS, "prompt million-prompts", prompts, REJECTED)
    lists = Repeated(b'{"max_tokens": 1, "prompt": [', b"[65],", 1_000_000, b"[65]]}")
    yield requests.post(COMPLETIONS, "prompt million-lists", lists, REJECTED)
    biases = b"".join(b'"%d": 1,' % number for number in range(10_000))
    bias = Repeated(b'{"prompt": "x", "logit_bias": {', biases, 50, b'"1": 1}}')
    yield requests.post(COMPLETIONS, "logit-bias 500000", bias, OVERLOADED)
    yield complete("answers 1024", prompt=["x"] * 8, n=128, max_tokens=1)
    yield complete("answers too-many", REJECTED, prompt=["hello"] * 20_000, n=128)
    yield complete("token negative", REJECTED, prompt=[-1])
    yield complete("token above-vocabulary", REJECTED, prompt=[10**9])
    yield complete("token boolean", REJECTED, prompt=[True])
    yield complete("token float", REJECTED, prompt=[65.0])
    yield complete("all-tokens-forbidden", logit_bias={str(token): -100 for token in range(264)})
    yield complete("all-tokens-stop", stop_token_ids=list(range(264)), min_tokens=2)
    for temperature in (1e-38, 1.2e-38, 1e-30, 1e-10, 1e-7):
        yield complete(f"temperature {temperature}", temperature=temperature, logit_bias={"65": 100, "66": -100})
    streaming = json.dumps({**COMPLETIONS.valid, "stream": True, "max_tokens": 200, "n": 4}).encode()
    steps = http_request("POST", COMPLETIONS.path, streaming, dict(COMPLETIONS.headers))
    for number in range(5):
        yield Attack(f"/v1/completions reset-in-stream {number}", (*steps, Pause(0.1), Reset()), count=4)
        yield Attack(f"/v1/completions unread-stream {number}", (*steps, Pause(1.0), Reset()), count=4)
    for kind in ("x" * 5_000, "../../etc/passwd", "%00", "%ff", "a/b/c", "tiny%0d%0aSet-Cookie:%20a"):
        model = requests.Endpoint(f"/v1/models/{kind}", {}, headers=bearer(API_KEY), method="GET")
        attack = requests.post(model, "", b"", HARMLESS)
        yield Attack(f"/v1/models {kind[:30]!r}", attack.steps, attack.allowed)
