"""Texts that are made to take long, or much memory: the attacker is refused, and regular clients are served."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.support.gateway_server import running_gateway
from tests.support.tiny import save_tiny_model
from verl.agent.search_loop import parse_action
from verl.inference.serving.response_text import ToolCallSplitter
from verl.tools.sandbox_fusion_tools import plain_code
from verl.utils.tool_calls import get_parser

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SEED = 32
PARSE_SECONDS = 3
HEALTH_SECONDS = 2.0
"""A loaded machine needs more than the 0.3 s of an idle one. A blocked event loop needs minutes."""


def post(url, content, seconds=120):
    """(status, body) of a request; `content` is bytes, or an object to send as JSON."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextlib.contextmanager
def healthy(address):
    """While this is open, /health answers each time within HEALTH_SECONDS."""
    slowest, ended = [0.0], threading.Event()

    def ask():
        while not ended.is_set():
            began = time.monotonic()
            with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
                assert answer.status == 200
            slowest[0] = max(slowest[0], time.monotonic() - began)
            time.sleep(0.02)

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        try:
            yield slowest
        finally:
            ended.set()
            asking.result()
    assert slowest[0] < HEALTH_SECONDS


# ---------------------------------------------------------------- the gateway


def user(text):
    return {"role": "user", "content": text}


def hostile_chats():
    """(name, body) of requests to the gateway; each takes seconds or gigabytes if it is simply carried out."""
    dice = random.Random(SEED)
    word = "".join(dice.choice("abc ") for _ in range(1000))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "string", "pattern": "(" + "|".join("a" * n + "b" for n in range(1000)) + ")*"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    yield "one message of 60 MB", {"messages": [user("x " * 30_000_000)]}
    yield "a message at the bound", {"messages": [user(word * 60)]}
    yield "a million messages", {"messages": [user("")] * 1_000_000}
    yield "many messages within the bound", {"messages": [user("")] * 2_000}
    yield "many tools", {"messages": [user("x")], "tools": [tool] * 200_000}
    yield "large options", {"messages": [user("x")], "chat_template_kwargs": {"a": word * 10_000}}
    yield "a large schema", {"messages": [user("x")], "response_format": form}
    yield "a long stop string", {"messages": [user("x")], "stop": word * 100}
    yield "nested values", b'{"messages": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    yield "a long number", b'{"messages": [], "seed": ' + b"9" * 1_000_000 + b"}"
    pieces = ["é漢", " \n", "<|user|>", "{", "<tool_call>"]
    for number in range(5):
        texts = [dice.choice(pieces) * dice.randrange(1, 40) for _ in range(dice.randrange(1, 4000))]
        yield f"random messages {number}", {"messages": [user(text) for text in texts]}


def test_a_gateway_serves_regular_clients_during_attacks():
    with running_gateway(lambda number: "fine", max_model_len=4096) as gateway:
        regular, attacker = (f"{gateway.base_url(name)}/v1/chat/completions" for name in ("regular", "attacker"))
        hello = {"messages": [user("hello")], "logprobs": True}
        assert post(attacker, {"messages": [user("x" * 20_000)]})[0] == 400  # starts the text workers
        before = psutil.Process().memory_info().rss
        expected = post(regular, hello)[1]["choices"]
        attacks = dict(hostile_chats())
        attacks = {
            name: body if isinstance(body, bytes) else json.dumps(body).encode() for name, body in attacks.items()
        }
        sizes = sum(map(len, attacks.values()))
        with ThreadPoolExecutor(4) as threads, healthy(gateway.address):
            sent = {name: threads.submit(post, attacker, body) for name, body in attacks.items()}
            answers = [post(regular, hello)[1]["choices"] for _ in range(10)]
            statuses = {name: future.result()[0] for name, future in sent.items()}
        assert answers == [expected] * 10
        assert all(status == 200 or 400 <= status < 500 for status in statuses.values()), statuses
        assert statuses["one message of 60 MB"] == 413
        grown = psutil.Process().memory_info().rss - before
        assert grown < 4 * sizes + 500 * 2**20, "the bodies, which this process sends too, and little more"


# ---------------------------------------------------------------- the inference server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of an inference server on a tiny model."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    log = folder.parent / "log"
    command = [sys.executable, "-m", "verl.inference.server", "--model", str(folder), "--port", "0", "--device", "cpu"]
    options = ["--allow-client-templates", "--max-parse-seconds", str(PARSE_SECONDS)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, *options], stdout=sink, stderr=sink, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        while not (found := re.search(r"at (http://127\.0\.0\.1:\d+)/v1", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_looping_templates_delay_no_other_client(server):
    chat = {"messages": [user("hi")], "max_tokens": 2, "temperature": 0}
    expected = post(f"{server}/v1/chat/completions", chat)[1]["choices"]
    with ThreadPoolExecutor(12) as threads, healthy(server):
        looping = [
            threads.submit(post, f"{server}/v1/chat/completions", {**chat, "chat_template": LOOPING}) for _ in range(12)
        ]
        time.sleep(0.5)
        answers = [post(f"{server}/v1/chat/completions", chat)[1]["choices"] for _ in range(20)]
        assert sum(future.done() for future in looping) < 12, "regular requests waited for all looping ones"
        assert answers == [expected] * 20
        refused = [future.result() for future in looping]
    assert {status for status, _ in refused} == {400}
    assert {answer["error"]["code"] for _, answer in refused} == {"text_work_limit"}


NUMBERS = ["0", "-0.0", "5e-324", "1e-40", "1e-38", "1e-5", "0.5", "1", "2", "1e3", "1e5", "1e20", "3.4e38", "1e39"]
NUMBERS += [
    "1e308",
    "1e999",
    "-1e999",
    "true",
    "null",
    "9" * 400,
    "-" + "9" * 400,
    "9" * 5000,
    '"1"',
    "[]",
    "{}",
    "NaN",
]
FIELDS = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
FIELDS += ["max_tokens", "min_tokens", "n", "best_of", "logprobs", "seed", "ignore_eos", "stop_token_ids", "stop"]
FIELDS += ["logit_bias", "echo", "prompt_logprobs", "stream"]


def hostile_parameters(count):
    """Bodies as text: most of these numbers are no JSON that Python writes."""
    dice = random.Random(SEED)
    for _ in range(count):
        fields = {name: dice.choice(NUMBERS) for name in dice.sample(FIELDS, dice.randrange(1, 4)) if name != "stream"}
        if "logit_bias" in fields:
            fields["logit_bias"] = f'{{"{dice.choice(["1", "01", "300", "-1"])}": {dice.choice(NUMBERS)}}}'
        fields.setdefault("max_tokens", "3")
        yield "{" + ", ".join(['"prompt": "hi"', *(f'"{name}": {value}' for name, value in fields.items())]) + "}"


def test_no_sampling_parameter_fails_the_server_or_another_request(server):
    url = f"{server}/v1/completions"
    regular = {"prompt": "hello", "max_tokens": 30, "seed": 5, "logprobs": 1, "ignore_eos": True}
    expected = post(url, regular)[1]["choices"]
    counts: dict[int, int] = {}
    with ThreadPoolExecutor(4) as threads, healthy(server):
        results = threads.map(lambda body: (body, *post(url, body.encode())), hostile_parameters(400))
        answers = [post(url, regular)[1]["choices"] for _ in range(20)]
        for body, status, answer in results:
            counts[status] = counts.get(status, 0) + 1
            assert status == 200 or 400 <= status < 500, (body, answer)
    assert [[choice["text"] for choice in choices] for choices in answers] == [[expected[0]["text"]]] * 20
    assert counts[200] > 20
    assert counts[400] > 20


# ---------------------------------------------------------------- parsers of what models write

PIECES = ["<tool_call>", "</tool_call>", "{", "}", "[", '"name"', '"name": "', " ", "\n", ",", "a", "<function="]
PIECES += ["<parameter=", "<arg_key>", "<arg_value>", "<|tool_call>", "call:f{", '<|"|>', "<|start|>", "<|channel|>"]
PIECES += ["<|message|>", " to=", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<｜tool▁calls▁begin｜>"]
PIECES += ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|python_tag|>", "{}", "</think>", "<search>", "</search>"]
PIECES += ["<answer>", "```", "``` \t", "```\n", "<escape>", "<start_function_call>", "1", "\\u00"]
FORMATS = ["hermes", "llama3_json", "deepseek", "glm", "kimi", "gemma", "openai", "qwen3_coder"]


def streamed(text):
    calls = ToolCallSplitter("")
    for start in range(0, len(text), 5000):
        calls.push(text[start : start + 5000], last=False)
    calls.push("", last=True)


PARSERS = {name: get_parser(name).parse for name in FORMATS}
PARSERS |= {"search": parse_action, "code": plain_code, "stream": streamed}


@pytest.mark.parametrize("name", PARSERS)
def test_parsers_take_time_in_proportion_to_the_text(name):
    """Squared, one of these texts alone takes minutes; together they take seconds."""
    dice, length = random.Random(SEED), 200_000
    texts = [piece * (length // len(piece)) for piece in PIECES]
    for _ in range(150):
        first, repeated, last = (dice.choice(PIECES) for _ in range(3))
        texts.append(first + repeated * (length // len(repeated)) + last)
    began = time.monotonic()
    for text in texts:
        PARSERS[name](text)
    assert time.monotonic() - began < 120
