"""The server of `verl view`: static page, JSON queries, streamed search, and server-sent events for live runs."""

from __future__ import annotations

import asyncio
import http.cookies
import json
import urllib.parse
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl.recording import RecordingError
from verl.utils.http_server.app import GeneratorResponse, HttpError, create_app
from verl.viewer.run import QUERIES, ViewedRun

STATIC = Path(__file__).parent / "static"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_MAX_BODY = 1 << 16
_COOKIE = "verl_view"
# Seconds between two checks of the runs' folders for changes; after this many checks without a change, a comment is
# sent to keep the connection open.
_POLL_S, _POLLS_PER_COMMENT = 1.0, 15
_MAX_HITS, _MAX_SEARCH_CHARS = 1000, 400


def create_viewer_app(runs: Sequence[ViewedRun], token: str | None = None) -> ASGIApp:
    """Return the ASGI application. With `token`, requests must send it, as API key, or as the cookie that
    `/?token=…` sets."""
    viewer = _Viewer(runs)
    routes = [
        Route("/", viewer.page),
        Route("/static/{name}", viewer.static),
        Route("/api/runs", viewer.runs),
        Route("/api/follow", viewer.follow),
        Route("/api/search", viewer.search),
        Route("/api/{query}", viewer.query),
    ]
    health = {"status": "ok", "runs": len(runs)}
    app = create_app(routes, health=lambda: health, max_body_bytes=_MAX_BODY, api_key=token)
    return app if token is None else _CookieLogin(app)


def run_names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short names of runs (summaries) that differ: the experiment, or the folder if experiments are equal."""
    names = [str(run["experiment"] or Path(run["folder"]).name) for run in runs]
    return [name if names.count(name) == 1 else run["folder"] for name, run in zip(names, runs, strict=True)]


class _Viewer:
    """Endpoints. Reads run in threads: a slow disk does not block other clients."""

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self._runs = runs

    async def page(self, _request: Request) -> Response:
        return _file("index.html")

    async def static(self, request: Request) -> Response:
        return _file(request.path_params["name"])

    async def runs(self, _request: Request) -> Response:
        def summaries() -> list[dict[str, Any]]:
            runs = [run.summary() for run in self._runs]
            return [{"name": name, **run} for name, run in zip(run_names(runs), runs, strict=True)]

        return await _json(summaries)

    async def query(self, request: Request) -> Response:
        name = request.path_params["query"]
        if name not in QUERIES:
            raise HttpError(404, f"there is no query {name[:50]!r}. Known: {', '.join(QUERIES)}.")
        run = self._run(request)
        method, parsers = QUERIES[name]
        arguments = {}
        for parameter, text in request.query_params.items():
            if parameter in parsers:
                try:
                    arguments[parameter] = parsers[parameter](text)
                except ValueError as error:
                    raise HttpError(400, f"{parameter}={text[:100]}: {error}.", param=parameter) from error
        missing = [parameter for parameter in parsers if parameter not in arguments and parameter != "names"]
        if missing:
            raise HttpError(400, f"{name}: the parameter {missing[0]} is missing.", param=missing[0])
        return await _json(lambda: method(run, **arguments))

    async def search(self, request: Request) -> Response:
        text = request.query_params.get("text", "")[:_MAX_SEARCH_CHARS]
        if not text:
            raise HttpError(400, "search: the parameter text is missing.", param="text")
        step = _integer(request, "step", None)
        run = self._run(request)
        try:
            results = await asyncio.to_thread(run.search, text, step)
        except RecordingError as error:
            raise HttpError(404, str(error)) from error
        return GeneratorResponse(_search(results), media_type="application/x-ndjson", headers=_HEADERS)

    async def follow(self, _request: Request) -> Response:
        return GeneratorResponse(self._changes(), media_type="text/event-stream", headers=_HEADERS)

    async def _changes(self) -> AsyncGenerator[str, None]:
        """Server-sent events: the number of each run in which something was recorded."""
        states = [run.state() for run in self._runs]
        yield ": connected\n\n"
        polls = 0
        while True:
            await asyncio.sleep(_POLL_S)
            polls += 1
            for number, run in enumerate(self._runs):
                state = await asyncio.to_thread(run.state)
                if state != states[number]:
                    states[number] = state
                    yield f"data: {number}\n\n"
                    polls = 0
            if polls >= _POLLS_PER_COMMENT:
                yield ": waiting\n\n"
                polls = 0

    def _run(self, request: Request) -> ViewedRun:
        number = _integer(request, "run", 0)
        if number is None or not 0 <= number < len(self._runs):
            raise HttpError(404, f"there is no run {number}; {len(self._runs)} are open.", param="run")
        return self._runs[number]


async def _search(results: Iterator[dict[str, Any]]) -> AsyncGenerator[str, None]:
    """The results of a search as lines of JSON, up to `_MAX_HITS` hits."""
    count = 0
    while count < _MAX_HITS:
        result = await asyncio.to_thread(next, results, None)
        if result is None:
            break
        result["hits"] = result["hits"][: _MAX_HITS - count]
        count += len(result["hits"])
        yield json.dumps(result) + "\n"
    yield json.dumps({"done": True, "is_complete": count < _MAX_HITS}) + "\n"


async def _json(build: Any) -> Response:
    def encode() -> bytes:
        return json.dumps(build(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    try:
        return Response(await asyncio.to_thread(encode), media_type="application/json", headers=_HEADERS)
    except RecordingError as error:
        raise HttpError(404, str(error)) from error


def _file(name: str) -> Response:
    # Only names of the folder itself: a path never leaves it.
    path = STATIC / name
    if path.name != name or not path.is_file() or path.suffix not in _TYPES:
        raise HttpError(404, f"there is no file {name[:100]!r}.")
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=_HEADERS)


def _integer(request: Request, name: str, default: int | None) -> int | None:
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError as error:
        raise HttpError(400, f"{name}={text[:100]} is not an integer.", param=name) from error


class _CookieLogin:
    """Lets browsers authenticate: `/?token=…` stores the token in a cookie, which is passed on as API key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parameters = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"))
        token = parameters.get("token", [None])[0]
        key = token or self._cookie(scope)
        if key is not None:
            scope = {**scope, "headers": [*scope["headers"], (b"x-api-key", key.encode())]}
        if token is None or scope["path"] != "/":
            return await self._app(scope, receive, send)
        await self._app(scope, receive, self._redirecting(token, scope, receive, send))

    def _redirecting(self, token: str, scope: Scope, receive: Receive, send: Send) -> Send:
        """Replace a successful response by a redirect without the token, which keeps it out of histories and logs."""
        accepted = False

        async def replace(message: Message) -> None:
            nonlocal accepted
            if message["type"] == "http.response.start" and message["status"] == 200:
                accepted = True
                response = RedirectResponse("/", 303, headers={"Referrer-Policy": "no-referrer"})
                response.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
                await response(scope, receive, send)
            elif not accepted:
                await send(message)

        return replace

    @staticmethod
    def _cookie(scope: Scope) -> str | None:
        for name, value in scope["headers"]:
            if name == b"cookie":
                try:
                    cookie = http.cookies.SimpleCookie(value.decode("latin-1")).get(_COOKIE)
                except http.cookies.CookieError:
                    continue
                if cookie is not None:
                    return cookie.value
        return None
