"""The request side of all servers: limits, numbers, authentication, errors, health and cancellation, in process."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from typing import ClassVar

import httpx
import pytest
from pydantic import Field, field_validator
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from verl.utils.http_server.app import (
    GeneratorResponse,
    HttpError,
    create_app,
    json_pieces,
    json_response,
    request_body,
)
from verl.utils.http_server.json_body import BodyParser, RequestModel, parse_json, parse_model


class Numbers(RequestModel):
    count: int = Field(default=1, ge=0, le=10)
    share: float = 0.5
    names: list[str] = Field(default_factory=list, max_length=3)
    flag: bool = False


class Crashing(RequestModel):
    end: ClassVar[signal.Signals] = signal.SIGSEGV
    text: str

    @field_validator("text")
    @classmethod
    def end_process(cls, text):
        os.kill(os.getpid(), cls.end)


class Killed(Crashing):
    end = signal.SIGKILL


async def echo(request):
    return JSONResponse(parse_model(Numbers, request_body(request)).model_dump())


async def fail(request):
    raise RuntimeError("secret /host/path")


async def reject(request):
    raise HttpError(409, "conflict", param="count", code="why")


async def large(request):
    return await json_response(lambda: {"text": "x" * 3_000_000}, 3_000_000)


async def breaks(request):
    async def pieces():
        yield b"first"
        raise HttpError(400, "too late")

    return StreamingResponse(pieces())


ROUTES = [
    Route("/echo", echo, methods=["POST"]),
    Route("/fail", fail),
    Route("/reject", reject),
    Route("/large", large),
    Route("/breaks", breaks),
]


def client(**options):
    given = {"health": lambda: {"status": "ok"}, "max_body_bytes": 1000, **options}
    transport = httpx.ASGITransport(create_app(ROUTES, **given), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://x")


def request(method, path, options=None, **arguments):
    async def run():
        async with client(**(options or {})) as http:
            return await http.request(method, path, **arguments)

    return asyncio.run(run())


def post(content, **arguments):
    headers = {"content-type": "application/json"}
    return request("POST", "/echo", content=content, headers=headers, **arguments)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{}", 200),
        ('{"count": null}', 200),
        ('{"count": 10}', 200),
        ('{"share": 1}', 200),
        ('{"count": 11}', 422),
        ('{"count": true}', 422),
        ('{"share": true}', 422),
        ('{"flag": 1}', 422),
        ('{"count": "1"}', 422),
        ('{"count": 1.0}', 422),
        ('{"share": "0.5"}', 422),
        ('{"share": NaN}', 400),
        ('{"share": -Infinity}', 400),
        ('{"share": 1e999}', 400),
        ('{"other": [1e999]}', 400),
        ('{"count": ' + "9" * 400 + "}", 400),
        ('{"count": ' + "9" * 5000 + "}", 413),
        ('{"names": ["a", "b", "c", "d"]}', 422),
        ('{"names": [1]}', 422),
        ('{"names": ["\\\\ud800"]}', 400),
        ('{"unknown": 1}', 422),
        ("[]", 422),
        ("1", 422),
        ("", 400),
        ("{", 400),
        ("[" * 999, 400),
        (b'{"names": ["\xed\xa0\x80"]}', 400),
        ("{}".encode("utf-16"), 400),
        ('{"names": ["\\\\ud83d\\\\ude00"]}', 200),
    ],
)
def test_numbers_and_types_are_checked_once_for_all_servers(body, status):
    content = body.replace("\\\\", "\\") if isinstance(body, str) else body
    reply = post(content)
    assert reply.status_code == status, reply.text
    assert status == 200 or reply.json()["detail"]


def test_nesting_that_exceeds_the_parser_is_a_400():
    with pytest.raises(HttpError) as error:
        parse_json(b"[" * 200_000)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("number", "digits"), [(str(2**64), 20), (str(-(2**63) - 1), 19), (str(1 - 2**64), 20), ("-" + "9" * 30, 30)]
)
def test_numbers_beyond_64_bits_are_rejected_and_the_sign_is_not_a_digit(number, digits):
    with pytest.raises(HttpError) as error:
        parse_json(number.encode())
    assert error.value.status == 400
    assert f"{digits} digits" in error.value.message


def test_64_bit_numbers_and_long_digits_in_texts_are_accepted():
    assert parse_json(b"[18446744073709551615, -9223372036854775808]") == [2**64 - 1, -(2**63)]
    assert parse_json(json.dumps({"text": "9" * 400}).encode()) == {"text": "9" * 400}


def test_a_body_that_is_too_large_is_a_413_and_another_content_type_a_415():
    assert post('{"names": ["' + "x" * 1000 + '"]}').status_code == 413
    assert request("POST", "/echo", content="{}").status_code == 415
    reply = request("POST", "/echo", content="count=1", headers={"content-type": "application/x-www-form-urlencoded"})
    assert reply.status_code == 415


def test_errors_have_the_dialect_of_the_server_and_no_internal_text(caplog):
    dialect = {"error_content": lambda path, error: {"error": [path, error.message, error.param, error.code]}}
    assert request("GET", "/reject", dialect).json() == {"error": ["/reject", "conflict", "count", "why"]}
    failed = request("GET", "/fail", dialect)
    assert failed.status_code == 500
    assert "secret" not in failed.text
    assert "secret /host/path" in caplog.text
    missing = request("GET", "/missing", dialect)
    assert (missing.status_code, missing.json()["error"][0]) == (404, "/missing")
    assert "POST /echo" in missing.text
    wrong_method = request("GET", "/echo", dialect)
    assert wrong_method.status_code == 405
    assert "method not allowed: GET /echo" in wrong_method.text


def test_a_trailing_slash_is_the_same_path():
    assert request("GET", "/reject/").status_code == 409


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "key"}, 401),
        ({"authorization": "Basic !!!"}, 401),
        ({"authorization": "Bearer key"}, 409),
        ({"x-api-key": "key"}, 409),
        ({"authorization": "Basic " + base64.b64encode(b"user:key").decode()}, 409),
    ],
)
def test_a_server_with_a_key_serves_only_clients_that_send_it(headers, status):
    assert request("GET", "/reject", {"api_key": "key"}, headers=headers).status_code == status
    assert request("GET", "/health", {"api_key": "key"}).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 409),
        ("localhost", 409),
        ("[::1]:80", 409),
        ("10.1.2.3", 409),
        ("attacker.example:8080", 403),
        ("localhost.attacker.example", 403),
        ("127.0.0.1.attacker.example", 403),
    ],
)
def test_a_foreign_host_name_at_a_loopback_address_is_rejected(host, status):
    assert request_to("127.0.0.1", host) == status
    assert request_to("10.0.0.1", host) == 409, "other machines use any name"
    assert request_to("127.0.0.1", host, api_key="key") == 401


def request_to(address, host, **options):
    app = create_app(ROUTES, health=dict, max_body_bytes=100, **options)
    statuses = []
    headers = [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": "/reject", "headers": headers, "query_string": b""}
    scope |= {"raw_path": b"/reject", "root_path": "", "server": (address, 80)}

    async def send(message):
        statuses.append(message.get("status"))

    async def receive():
        return await asyncio.get_running_loop().create_future()

    asyncio.run(app(scope, receive, send))
    return statuses[0]


def test_large_responses_arrive_whole():
    reply = request("GET", "/large")
    assert len(reply.json()["text"]) == 3_000_000


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"a": {}, "b": [], "c": (1, 2.5, None, True), "d": "\u00e4\U0001f600" * 300_000, 1: ["x"]},
        [list(range(20_000)), {"nested": [[1], [], {"x": ["y", 1]}] * 3000}],
        ["text"] * 10_000,
    ],
)
def test_pieces_of_json_are_the_json(content):
    assert json.loads("".join(json_pieces(content))) == json.loads(json.dumps(content))
    assert all(len(piece) < 600_000 for piece in json_pieces(content))


def call(app, messages, on_send, path="/wait", method="POST"):
    """Run one request on the ASGI interface; `messages` are received, then nothing."""
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}

    async def receive():
        if messages:
            message = messages.pop(0)
            return await message() if callable(message) else message
        return await asyncio.get_running_loop().create_future()

    async def send(message):
        on_send(message)

    return app({**scope, "raw_path": path.encode(), "root_path": ""}, receive, send)


def test_a_handler_is_cancelled_when_its_client_disconnects():
    events = []

    async def wait(request):
        events.append("started")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    async def disconnect():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def run():
        app = create_app([Route("/wait", wait, methods=["POST"])], health=dict, max_body_bytes=100)
        body = {"type": "http.request", "body": b"{}", "more_body": False}
        await call(app, [body, disconnect], events.append)

    asyncio.run(run())
    assert events == ["started", "cancelled"]


@pytest.mark.parametrize("disconnects", [True, False])
def test_a_streamed_response_closes_its_generator(disconnects):
    closed, sent, turns = [], [], []

    async def pieces():
        try:
            for number in range(3):
                yield str(number)
            if disconnects:
                await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def stream(request):
        return GeneratorResponse(pieces(), media_type="text/event-stream")

    async def disconnect():
        await asyncio.sleep(0.05 if disconnects else 60)
        return {"type": "http.disconnect"}

    async def other_client():
        while not closed:
            turns.append(len(sent))
            await asyncio.sleep(0)

    async def run():
        app = create_app([Route("/wait", stream, methods=["POST"])], health=dict, max_body_bytes=100)
        body = {"type": "http.request", "body": b"{}", "more_body": False}
        await asyncio.gather(call(app, [body, disconnect], sent.append), other_client())

    asyncio.run(run())
    start, *messages = sent
    assert (start["status"], dict(start["headers"])[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    ends = [] if disconnects else [(b"", False)]
    assert [(message["body"], message["more_body"]) for message in messages] == [
        *((str(number).encode(), True) for number in range(3)),
        *ends,
    ]
    assert {2, 3} <= set(turns), "other tasks run between two pieces"


def test_a_disconnect_while_the_body_is_sent_frees_what_was_buffered():
    async def run():
        app = create_app(ROUTES, health=dict, max_body_bytes=10**9)
        part = {"type": "http.request", "body": b"x" * 2_000_000, "more_body": True}
        await call(app, [part, {"type": "http.disconnect"}], [].append, "/echo")
        return app.buffered_bytes

    assert asyncio.run(run()) == 0


def test_large_bodies_share_a_budget_and_small_ones_are_always_accepted(monkeypatch):
    monkeypatch.setattr("verl.utils.http_server.app.BUFFER_BUDGET_BYTES", 3 << 20)
    statuses = {}

    def record(name):
        return lambda message: statuses.setdefault(name, message.get("status"))

    async def run():
        app = create_app(ROUTES, health=dict, max_body_bytes=3 << 20)
        part = {"type": "http.request", "body": b"x" * (2 << 20), "more_body": True}
        first = asyncio.ensure_future(call(app, [part], record("first"), "/echo"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        whole = {"type": "http.request", "body": b"x" * (2 << 20), "more_body": False}
        await call(app, [whole], record("second"), "/echo")
        await call(app, [{"type": "http.request", "body": b"{}", "more_body": False}], record("small"), "/echo")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(run())
    assert statuses == {"second": 503, "small": 200}


def test_slow_small_bodies_do_not_use_the_budget_of_large_ones(monkeypatch):
    monkeypatch.setattr("verl.utils.http_server.app.BUFFER_BUDGET_BYTES", 3 << 20)

    async def run():
        app = create_app(ROUTES, health=dict, max_body_bytes=3 << 20)
        part = {"type": "http.request", "body": b"x" * ((1 << 20) - 1), "more_body": True}
        slow = [asyncio.ensure_future(call(app, [part], [].append, "/echo")) for _ in range(8)]
        await asyncio.sleep(0.01)
        statuses = []
        whole = {"type": "http.request", "body": b"x" * (2 << 20), "more_body": False}
        await call(app, [whole], lambda message: statuses.append(message.get("status")), "/echo")
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return statuses[0], app.buffered_bytes

    assert asyncio.run(run()) == (400, 0)


@pytest.mark.processes
def test_large_bodies_are_parsed_in_a_process_with_limits(monkeypatch):
    monkeypatch.setattr("verl.utils.http_server.json_body.MEMORY_BYTES", 128 << 20)
    monkeypatch.setattr("verl.utils.http_server.json_body.PARSE_TIMEOUT_S", 5.0)

    async def run():
        parser = BodyParser()
        try:
            names = await parser.parse(Numbers, json.dumps({"names": ["x" * 1_000_000]}).encode())
            assert names.names == ["x" * 1_000_000]
            with pytest.raises(HttpError) as wrong:
                await parser.parse(Numbers, json.dumps({"names": ["x"] * 1_000_000}).encode())
            assert (wrong.value.status, wrong.value.param) == (422, "names")
            with pytest.raises(HttpError) as bomb:
                await parser.parse(Numbers, b"[" + b"{}," * 5_000_000 + b"{}]")
            assert bomb.value.status == 400
            with pytest.raises(HttpError) as crash:
                await parser.parse(Crashing, json.dumps({"text": "x" * 1_000_000}).encode())
            assert crash.value.status == 400
            assert ": its process was killed by SIGSEGV. Shorten" in crash.value.message
            with pytest.raises(HttpError) as killed:
                await parser.parse(Killed, json.dumps({"text": "x" * 1_000_000}).encode())
            assert killed.value.status == 503
            assert ": its process was killed by SIGKILL " in killed.value.message
        finally:
            parser.close()

    asyncio.run(run())
