"""The router in front of real servers: streams, cancellation, servers that are lost."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from verl.inference.serving.router import Router
from verl.utils.http_server.app import HttpError, create_app
from verl.utils.http_server.server import ConnectionLimits, LocalServer

KEY = "a key"


class Backend:
    """A server whose /stream sends one piece and then waits for `release`."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()
        routes = [Route("/echo", self._echo, methods=["POST"]), Route("/stream", self._stream, methods=["POST"])]
        routes += [Route("/bad", self._bad, methods=["POST"])]
        routes += [Route("/files/{name:path}", self._target, methods=["GET"])]
        self.app = create_app(routes, health=lambda: {}, max_body_bytes=2**20, api_key=KEY)

    async def _echo(self, request: Request) -> Response:
        return JSONResponse(await request.json())

    async def _target(self, request: Request) -> Response:
        raw_path, query = request.scope["raw_path"].decode(), request.scope["query_string"].decode()
        return JSONResponse([raw_path, query, request.path_params["name"]])

    async def _bad(self, _request: Request) -> Response:
        raise HttpError(422, "bad")

    async def _stream(self, _request: Request) -> Response:
        async def pieces():
            yield "first"
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            yield "second"

        return StreamingResponse(pieces(), media_type="text/event-stream")


def routed(check):
    """Run `check(router, client, backend)` with a router in front of one server."""

    async def run() -> None:
        backend, router = Backend(), Router()
        async with (
            LocalServer(backend.app, "a backend", ConnectionLimits()) as behind,
            LocalServer(router.app(), "a router", ConnectionLimits()) as address,
            httpx.AsyncClient(base_url=address) as client,
        ):
            router.servers = {behind.removeprefix("http://"): KEY}
            await check(router, client, backend)

    asyncio.run(run())


async def in_flight(client):
    return (await client.get("/health")).json()["unfinished_requests"]


def test_replies_are_forwarded_with_their_status_and_type():
    async def check(_router, client, _backend):
        reply = await client.post("/echo", json={"text": "é" * 300_000})
        assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
        assert reply.json() == {"text": "é" * 300_000}
        reply = await client.post("/bad", json={})
        assert (reply.status_code, reply.json()) == (422, {"detail": "bad"})
        assert (await client.get("/health")).json() == {"status": "ok", "servers": 1, "unfinished_requests": 0}

    routed(check)


@pytest.mark.parametrize("query", ["", "after=a%26b&limit=2"])
def test_escaped_paths_and_queries_are_forwarded_as_they_are(query):
    async def check(_router, client, _backend):
        reply = await client.get("/files/a%3Fb%20%25%C3%A9" + (f"?{query}" if query else ""))
        assert reply.json() == ["/files/a%3Fb%20%25%C3%A9", query, "a?b %é"]

    routed(check)


@pytest.mark.parametrize("path", ["/files//a", "/files/a/../b", "/files/%7e%2f%zz", "/files/{a}|b"])
def test_paths_that_a_client_would_normalize_are_forwarded_as_they_are(path):
    async def check(_router, client, _backend):
        reply = await client.get("/", extensions={"target": path.encode() + b"?x=%41{}"})
        assert reply.json()[:2] == [path, "x=%41{}"]

    routed(check)


def test_a_path_with_other_characters_is_rejected():
    async def check(router, _client, _backend):
        request = Request({"type": "http", "method": "GET", "raw_path": b"/\xff", "query_string": b"", "headers": []})
        with pytest.raises(HttpError) as error:
            await router._forward(request)
        assert error.value.status == 400

    routed(check)


def test_a_stream_is_forwarded_as_it_arrives():
    async def check(_router, client, backend):
        async with client.stream("POST", "/stream", json={}) as reply:
            pieces = reply.aiter_text()
            assert await anext(pieces) == "first"
            assert await in_flight(client) == 1
            backend.release.set()
            assert await anext(pieces) == "second"

    routed(check)


def test_a_client_that_disconnects_cancels_its_request_at_the_server():
    async def check(_router, client, backend):
        async with client.stream("POST", "/stream", json={}) as reply:
            assert await anext(reply.aiter_text()) == "first"
        await backend.cancelled.wait()
        while await in_flight(client):
            await asyncio.sleep(0.01)

    routed(check)


@pytest.mark.parametrize("servers", [{}, None], ids=["no server", "a server that is gone"])
def test_without_a_server_the_status_is_503(servers):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = {f"127.0.0.1:{closed.getsockname()[1]}": KEY}

    async def check(router, client, _backend):
        router.servers = gone if servers is None else servers
        reply = await client.post("/echo", json={})
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "server_error")
        assert reply.headers["retry-after"] == "1"
        assert await in_flight(client) == 0

    routed(check)
