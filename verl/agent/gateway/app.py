"""The gateway's HTTP API as an ASGI app: below /sessions/<id> the OpenAI and the Anthropic API, rewards, the record."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from verl.agent.gateway.answer import Answer
from verl.agent.gateway.anthropic_api import AnthropicReplies, error_content
from verl.agent.gateway.requests import MESSAGES
from verl.agent.gateway.session import Model, Session, Sessions
from verl.inference.serving import openai_replies
from verl.inference.serving.fields import ApiError, read_json
from verl.inference.serving.openai_replies import Part
from verl.inference.serving.openai_requests import CHAT, Ask
from verl.utils.http_server.asgi import JSON, Gone, Receive, Response, Send, headers_of, read_body, while_there

__all__ = ["GatewayApp"]

_EVENTS = b"text/event-stream"
_MAX_BODY = 64 * 2**20
_PING_S = 10.0
"""A stream without news says so this often: some clients and proxies give up on silence."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


class GatewayApp:
    """Answers the requests of sessions. What is told whole is in the session's tree, token for token."""

    def __init__(
        self,
        sessions: Sessions,
        model: Model,
        on_close: Callable[[Session], Awaitable[None]] | None = None,
        ping_s: float = _PING_S,
    ) -> None:
        """`on_close` gets a session that its client has ended."""
        self._sessions, self._model, self._on_close, self._ping_s = sessions, model, on_close, ping_s
        self._since = int(time.time())

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path, response = scope["path"].rstrip("/"), Response(send)
        try:
            await self._route(scope["method"], path, headers_of(scope), receive, response)
        except Gone:
            return
        except asyncio.CancelledError:
            logger.info("a request was cut off: the server stops")
        except Exception as error:
            refusal = error
            if not isinstance(error, ApiError):
                logger.exception("%s %s failed", scope["method"], path)
                refusal = ApiError(f"the gateway failed: {error}", status=500)
            if response.begun:
                raise
            assert isinstance(refusal, ApiError)
            content = error_content(refusal) if path.endswith(MESSAGES) else refusal.content
            await response.whole(refusal.status, content)

    async def _route(
        self, method: str, path: str, headers: dict[str, str], receive: Receive, response: Response
    ) -> None:
        _, root, name, rest = ([*path.split("/", 3), "", "", ""])[:4]
        if root != "sessions" or not name:
            rest, name = path.removeprefix("/"), ""
        match method, name, f"/{rest}".rstrip("/"):
            case "GET", "", "/health":
                await response.whole(200, {"status": "ok", "sessions": len(self._sessions.names)})
            case "GET", _, "/v1/models":
                await response.whole(200, {"object": "list", "data": [self._entry()]})
            case "POST", name, "/v1/chat/completions" | "/v1/messages" as api if name:
                session, body = self._sessions.find(name), await _body(headers, receive)
                ended = ApiError(f"session {name!r} has ended.", status=410, code="no_session")
                if session.closed:  # while the body came
                    raise ended
                try:
                    await while_there(self._generate(session, api, body, response), receive)
                except Gone:
                    if session.closed and not response.begun:
                        raise ended from None
                    raise
            case "POST", name, "/reward_info" if name:
                session = self._sessions.find(name)
                session.reward_info = _reward_info(read_json(await _body(headers, receive)))
                await response.whole(200, {"status": "ok"})
            case "GET", name, "" if name:
                await response.whole(200, self._sessions.find(name).state())
            case "DELETE", name, "" if name:
                session = await self._sessions.close(name)
                if self._on_close is not None:
                    await self._on_close(session)
                await response.whole(200, session.state())
            case _:
                raise ApiError(
                    f"there is no {method} {path}. There are POST /sessions/<id>{CHAT}, POST /sessions/<id>{MESSAGES},"
                    " POST /sessions/<id>/reward_info, GET and DELETE /sessions/<id>, GET /v1/models, GET /health.",
                    status=404,
                )

    def _entry(self) -> dict[str, Any]:
        return {"id": self._model.facts.names[0], "object": "model", "created": self._since, "owned_by": "verl"}

    # ---------------------------------------------------------------- generating

    async def _generate(self, session: Session, api: str, body: bytes, response: Response) -> None:
        model = self._model
        asked = await model.read(api, body)
        place, chat = await session.place(asked, model), asked.chat
        ask = replace(chat.ask, prompts=[place.prompt_ids])
        answer = Answer(chat, asked.reads_calls, model.parser, model.tokenizer, model.ends(chat))
        replies = (AnthropicReplies if api == MESSAGES else OpenAIReplies)(ask, answer, model.tokenizer)
        (request,) = ask.requests(model.facts.max_model_len)
        parts = session.answer(place, request, answer)
        with session.under_way():
            async with contextlib.aclosing(parts):
                await (self._stream if ask.stream else self._whole)(parts, replies, response)

    async def _whole(self, parts: AsyncIterator[Part], replies: Replies, response: Response) -> None:
        told = Part(0)
        async for part in parts:
            told = Part(0, told.text + part.text, told.tokens + part.tokens, part.calls, 0, part.finish_reason)
        await response.piece(replies.whole(told), JSON)
        await response.end()

    async def _stream(self, parts: AsyncIterator[Part], replies: Replies, response: Response) -> None:
        await response.piece(replies.begin(), _EVENTS)
        try:
            async for part in _with_pauses(parts, self._ping_s):
                if part is None:
                    await response.piece(replies.ping, _EVENTS)
                elif part.text or part.calls or part.finish_reason:
                    await response.piece(replies.piece(part), _EVENTS)
            await response.piece(replies.end(), _EVENTS)
        except ApiError as error:
            await response.piece(replies.error(error), _EVENTS)
        await response.end()


class Replies(Protocol):
    """The reply to one request as its API words it: whole, or as events."""

    ping: str

    def whole(self, part: Part) -> str: ...
    def begin(self) -> str: ...
    def piece(self, part: Part) -> str: ...
    def end(self) -> str: ...
    def error(self, error: ApiError) -> str: ...


class OpenAIReplies:
    """As the OpenAI API words it."""

    ping = ": ping\n\n"

    def __init__(self, ask: Ask, answer: Answer, tokenizer: Any) -> None:
        self._answer, self._usage = answer, ask.include_usage
        self._replies = openai_replies.Replies(ask, True, tokenizer)

    def whole(self, part: Part) -> str:
        before, after = self._replies.frame(len(self._answer.output.token_ids))
        return before + self._replies.choice(part) + after

    def begin(self) -> str:
        return f"data: {self._replies.first_piece(0)}\n\n"

    def piece(self, part: Part) -> str:
        return f"data: {self._replies.piece(part)}\n\n"

    def end(self) -> str:
        usage = self._replies.usage_piece(len(self._answer.output.token_ids)) if self._usage else ""
        return f"data: {usage}\n\ndata: [DONE]\n\n" if usage else "data: [DONE]\n\n"

    def error(self, error: ApiError) -> str:
        return f"data: {json.dumps(error.content, ensure_ascii=False)}\n\n"


async def _with_pauses(pieces: AsyncIterator[T], seconds: float) -> AsyncIterator[T | None]:
    """The pieces, and None each time that nothing has come for so long."""
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


async def _body(headers: dict[str, str], receive: Receive) -> bytes:
    # A page in somebody's browser can send a form to this address, but not JSON.
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(f"Content-Type is {kind!r}. Send the request as application/json.")
    too_large = ApiError(f"the body is larger than {_MAX_BODY} bytes.", status=413)
    return await read_body(headers, receive, _MAX_BODY, too_large)


def _reward_info(given: dict[str, Any]) -> dict[str, Any]:
    info = given.get("reward_info")
    if not isinstance(info, dict):
        raise ApiError('reward_info: send {"reward_info": {"reward": 1.0, …}}.', "reward_info")
    reward = info.get("reward")
    if reward is not None and not isinstance(reward, int | float):
        raise ApiError(f"reward_info.reward: {str(reward)[:200]!r} must be a number.", "reward_info")
    return info
