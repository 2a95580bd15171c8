"""The gateway's HTTP API as an ASGI app: OpenAI and Anthropic endpoints of sessions, rewards, recorded state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from verl.agent.gateway.anthropic import AnthropicFormatter, anthropic_error
from verl.agent.gateway.requests import MESSAGES
from verl.agent.gateway.session import GatewaySession, Model, Sessions
from verl.agent.gateway.streamed_response import StreamedResponse
from verl.inference.serving.api import ApiError, openai_error
from verl.inference.serving.openai_requests import CHAT, ParsedRequest
from verl.inference.serving.openai_responses import ResponseChunk, ResponseEncoder
from verl.utils.http_server.app import GeneratorResponse, HttpError, create_app, json_response, request_body
from verl.utils.http_server.json_body import RequestModel, parse_json, validate_model

__all__ = ["MAX_REWARD", "GatewayApp"]

MAX_BODY_BYTES = 64 * 2**20
MAX_REWARD = 1e9
_MAX_REWARD_INFO_BYTES = 64 * 2**10
_MAX_REWARD_INFO_DEPTH = 32
_PING_S = 10.0
"""Interval of pings in a stream without events: some clients and proxies close silent connections."""
_SECRET = "session_secret"
"""Key of the ASGI scope under which handlers find the session's secret."""

T = TypeVar("T")


class RewardInfo(RequestModel):
    """A reward, with any further fields; stored in the trajectory as the client sent it."""

    model_config = ConfigDict(extra="allow")

    reward: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)] | None = None


class RewardRequest(RequestModel):
    """`POST /sessions/<name>/reward_info`."""

    model_config = ConfigDict(extra="ignore")

    reward_info: RewardInfo


class GatewayApp:
    """Records every completed response, with its tokens, in the tree of its session.

    A request belongs to the session of its name and its secret: the path's `/sessions/<name>~<secret>`, or without one
    the API key that the client sends (if the server itself has no `api_key`).
    """

    def __init__(
        self,
        sessions: Sessions,
        model: Model,
        on_close: Callable[[GatewaySession], Awaitable[None]] | None = None,
        ping_s: float = _PING_S,
        max_body_bytes: int = MAX_BODY_BYTES,
        api_key: str | None = None,
    ) -> None:
        """`on_close` is called with a session that its client has deleted."""
        self._sessions, self._model, self._on_close, self._ping_s = sessions, model, on_close, ping_s
        self._keys_are_secrets = api_key is None
        self._since = int(time.time())
        path = "/sessions/{name}"
        routes = [
            Route(path + CHAT, self._generate, methods=["POST"]),
            Route(path + MESSAGES, self._generate, methods=["POST"]),
            Route(path + "/reward_info", self._set_reward, methods=["POST"]),
            Route(path, self._state, methods=["GET"]),
            Route(path, self._delete, methods=["DELETE"]),
            Route(path + "/v1/models", self._models, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        self._app = create_app(
            routes, health=self._health, max_body_bytes=max_body_bytes, api_key=api_key, error_content=_error_content
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Paths appear in logs and error messages: the secret is removed and passed to handlers separately.
        public, _, private = scope["path"].partition("~")
        secret, slash, subpath = private.partition("/")
        path = public + slash + subpath
        await self._app({**scope, "path": path, "raw_path": path.encode(), _SECRET: secret}, receive, send)

    def _health(self) -> Mapping[str, Any]:
        return {"status": "ok", "sessions": len(self._sessions)}

    async def _models(self, _request: Request) -> Response:
        entry = {"id": self._model.model_info.names[0], "object": "model", "created": self._since, "owned_by": "verl"}
        return JSONResponse({"object": "list", "data": [entry]})

    def _access(self, request: Request) -> tuple[str, str]:
        """The name and the secret of the request's session."""
        headers, secret = request.headers, str(request.scope[_SECRET])
        if not secret and self._keys_are_secrets:
            secret = headers.get("x-api-key") or headers.get("authorization", "").partition(" ")[2].strip()
        if not secret:
            how = "Send an API key, or use" if self._keys_are_secrets else "Use"
            raise ApiError(f"a session needs a secret. {how} the path /sessions/<name>~<secret>.", status=401)
        return request.path_params["name"], secret

    async def _state(self, request: Request) -> Response:
        return await _state_response(self._sessions.get(*self._access(request)))

    async def _delete(self, request: Request) -> Response:
        session = self._sessions.get(*self._access(request))
        await self._sessions.close(session)
        if self._on_close is not None:
            await self._on_close(session)
        return await _state_response(session)

    async def _set_reward(self, request: Request) -> Response:
        session, body = self._sessions.get(*self._access(request)), request_body(request)
        if len(body) > _MAX_REWARD_INFO_BYTES:
            message = f"reward_info: the body has {len(body)} bytes; at most {_MAX_REWARD_INFO_BYTES} are accepted."
            raise ApiError(message, "reward_info", 413)
        content = parse_json(body)
        validate_model(RewardRequest, content, status=400)
        if (depth := _depth(content["reward_info"])) > _MAX_REWARD_INFO_DEPTH:
            message = f"reward_info: has {depth} levels; at most {_MAX_REWARD_INFO_DEPTH} are accepted."
            raise ApiError(message, "reward_info")
        session.reward_info = content["reward_info"]
        return JSONResponse({"status": "ok"})

    # ---------------------------------------------------------------- generating

    async def _generate(self, request: Request) -> Response:
        api = MESSAGES if request.scope["path"].endswith(MESSAGES) else CHAT
        with self._sessions.use(*self._access(request)) as session:
            model = self._model
            gateway_request = await model.read(api, request_body(request))
            node, chat = await session.add_request(gateway_request, model), gateway_request.chat
            parsed = replace(chat.generation, prompts=[node.prompt_ids])
            ends = await model.ends(chat)
            response = StreamedResponse(chat, gateway_request.parse_calls, model.parser, model.tokenizer, ends)
            formatter = (AnthropicFormatter if api == MESSAGES else OpenAIFormatter)(parsed, response, model.tokenizer)
            (engine_request,) = parsed.requests(model.model_info.max_model_len)
            chunks = session.respond(node, engine_request, response)
            if not parsed.stream:
                return await _complete(chunks, formatter)
        return GeneratorResponse(self._events(session, chunks, formatter), media_type="text/event-stream")

    async def _events(
        self, session: GatewaySession, chunks: AsyncGenerator[ResponseChunk, None], formatter: ResponseFormatter
    ) -> AsyncGenerator[str, None]:
        try:
            with session.under_way():
                yield formatter.begin()
                async with (
                    contextlib.aclosing(chunks),
                    contextlib.aclosing(_with_pauses(chunks, self._ping_s)) as paced,
                ):
                    async for chunk in paced:
                        if chunk is None:
                            yield formatter.ping
                        elif chunk.text or chunk.calls or chunk.finish_reason:
                            yield formatter.chunk(chunk)
            yield formatter.end()
        except HttpError as error:
            yield formatter.error(error)
        except Exception:
            yield formatter.error(HttpError(500, "the server failed; the cause is in its log."))
            raise


def _error_content(path: str, error: HttpError) -> Mapping[str, Any]:
    return (anthropic_error if path.endswith(MESSAGES) else openai_error)(path, error)


async def _state_response(session: GatewaySession) -> Response:
    state = session.state()  # not in a thread: requests change the tree
    return await json_response(lambda: state, session.tree.stored_bytes)


def _depth(content: Any) -> int:
    """Levels of nested objects and arrays."""
    depth, level = 0, [content]
    while level:
        depth += 1
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return depth


async def _complete(chunks: AsyncGenerator[ResponseChunk, None], formatter: ResponseFormatter) -> Response:
    texts: list[str] = []
    whole = ResponseChunk(0)
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            texts.append(chunk.text)
            whole.tokens += chunk.tokens
            whole.calls, whole.finish_reason = chunk.calls, chunk.finish_reason
    whole.text = "".join(texts)
    # Log-probs of a long response are megabytes of JSON.
    text = await asyncio.to_thread(formatter.whole, whole)
    return Response(text, media_type="application/json")


class ResponseFormatter(Protocol):
    """Formats the response to one request in the client's API, as one body or as events."""

    ping: str

    def whole(self, chunk: ResponseChunk) -> str: ...
    def begin(self) -> str: ...
    def chunk(self, chunk: ResponseChunk) -> str: ...
    def end(self) -> str: ...
    def error(self, error: HttpError) -> str: ...


class OpenAIFormatter:
    """Formats responses of the OpenAI API."""

    ping = ": ping\n\n"

    def __init__(self, parsed: ParsedRequest, response: StreamedResponse, tokenizer: Any) -> None:
        self._response, self._usage = response, parsed.include_usage
        self._encoder = ResponseEncoder(parsed, True, tokenizer)

    def whole(self, chunk: ResponseChunk) -> str:
        before, after = self._encoder.frame(len(self._response.output.token_ids))
        return before + self._encoder.choice(chunk) + after

    def begin(self) -> str:
        return f"data: {self._encoder.first_chunk(0)}\n\n"

    def chunk(self, chunk: ResponseChunk) -> str:
        return f"data: {self._encoder.chunk(chunk)}\n\n"

    def end(self) -> str:
        usage = self._encoder.usage_chunk(len(self._response.output.token_ids)) if self._usage else ""
        return f"data: {usage}\n\ndata: [DONE]\n\n" if usage else "data: [DONE]\n\n"

    def error(self, error: HttpError) -> str:
        return f"data: {json.dumps(openai_error('', error), ensure_ascii=False)}\n\n"


async def _with_pauses(pieces: AsyncIterator[T], seconds: float) -> AsyncGenerator[T | None, None]:
    """Yield the pieces, and None whenever no piece arrived for `seconds`."""
    following: asyncio.Future[T] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(pieces))
            done, _ = await asyncio.wait({following}, timeout=seconds)
            if not done:
                yield None
                continue
            try:
                piece = following.result()
            except StopAsyncIteration:
                return
            following = None
            yield piece
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
