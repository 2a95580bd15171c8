"""The HTTP server: keep-alive, events, refusals; who leaves cancels his request; closing lets requests finish."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from verl.inference.serving.http_server import EventStream, HttpServer, Reply


def served(handler, conversation, grace=5.0):
    """Run `conversation(address, server)` against a real socket."""

    async def run():
        server = HttpServer(handler)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        await server.start(bound)
        try:
            return await asyncio.wait_for(conversation(bound.getsockname(), server), 60)
        finally:
            await server.close(grace)

    return asyncio.run(run())


async def echo(request):
    return Reply(200, {"path": request.path, "body": request.body.decode()})


def said(address, data, close=False):
    async def talk():
        reader, writer = await asyncio.open_connection(*address)
        writer.write(data)
        answer = await reader.read() if close else await reader.readuntil(b"}")
        writer.close()
        return answer.decode()

    return talk()


def post(path, body, *headers):
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body.encode())}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def test_requests_of_one_connection_are_answered_in_order_also_when_sent_together():
    async def conversation(address, _):
        return await said(address, post("/a?q=1", "é") + post("/b", "", "Connection: close"), close=True)

    answer = served(echo, conversation)
    assert answer.count("HTTP/1.1 200 OK") == 2
    assert answer.index('{"path": "/a", "body": "é"}') < answer.index('{"path": "/b", "body": ""}')
    assert answer.count("Connection: close") == answer.count("Connection: keep-alive") == 1


def test_events_come_as_they_are_made_in_chunks():
    async def events():
        yield "one"
        await asyncio.sleep(0)
        yield "two"

    async def handler(request):
        return EventStream(events())

    async def conversation(address, _):
        return await said(address, post("/", "", "Connection: close"), close=True)

    answer = served(handler, conversation)
    assert "Content-Type: text/event-stream" in answer
    assert answer.endswith("\r\n\r\nb\r\ndata: one\n\n\r\nb\r\ndata: two\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000, 431),
    ],
)
def test_what_cannot_be_read_is_refused_and_the_connection_ends(request_bytes, status):
    async def conversation(address, _):
        return await said(address, request_bytes, close=True)

    answer = served(echo, conversation)
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert json.loads(answer.rpartition("\r\n\r\n")[2])["error"]["message"]


def test_a_handler_that_fails_is_an_error_of_the_server_and_the_connection_goes_on():
    async def handler(request):
        if request.path == "/bad":
            raise KeyError("x")
        return await echo(request)

    async def conversation(address, _):
        return await said(address, post("/bad", "") + post("/good", "", "Connection: close"), close=True)

    answer = served(handler, conversation)
    assert answer.startswith("HTTP/1.1 500 ")
    assert '"path": "/good"' in answer


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_cancels_its_request(streaming):
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def wait_for_ever():
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def events():
        yield "one"
        await wait_for_ever()

    async def handler(request):
        if streaming:
            return EventStream(events())
        await wait_for_ever()
        return Reply(200, {})

    async def conversation(address, _):
        _, writer = await asyncio.open_connection(*address)
        writer.write(post("/", ""))
        await began.wait()
        writer.close()
        await cancelled.wait()

    served(handler, conversation)
    assert cancelled.is_set()


def test_closing_lets_requests_finish_and_cuts_off_those_that_take_too_long():
    release = asyncio.Event()

    async def handler(request):
        await (release.wait() if request.path == "/short" else asyncio.Event().wait())
        return Reply(200, {"path": request.path})

    async def conversation(address, server):
        idle = await asyncio.open_connection(*address)
        short = asyncio.ensure_future(said(address, post("/short", ""), close=True))
        long = asyncio.ensure_future(said(address, post("/long", ""), close=True))
        while sum(connection.busy for connection in server._connections.values()) < 2:
            await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(server.close(1.0))
        await asyncio.sleep(0)
        release.set()
        await closing
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        return await short, await long, await idle[0].read()

    short, long, idle = served(handler, conversation)
    assert short.endswith('{"path": "/short"}')
    assert long == ""
    assert idle == b""
