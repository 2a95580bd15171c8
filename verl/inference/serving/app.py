"""The OpenAI API of an engine: /v1/completions, /v1/chat/completions, /v1/models, /health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from verl.inference.async_engine import AsyncEngine
from verl.inference.serving.api_app import GeneratorResponse, create_model_app
from verl.inference.serving.api_errors import ApiError
from verl.inference.serving.openai_replies import Part, Replies, Token, prompt_tokens, sampled_tokens
from verl.inference.serving.openai_requests import CHAT, COMPLETIONS, Ask, ModelFacts
from verl.inference.serving.parsers import Parsers
from verl.inference.serving.text_stream import TextStream
from verl.inference.serving.tool_calls import ToolText
from verl.types.request import Output, Request
from verl.utils.exceptions import rename_fields
from verl.utils.http_server.app import request_body

__all__ = ["OpenAIServer", "api_errors", "in_options"]

# Tokens before a response, so that decoders do not treat its first word as the beginning of a text.
_CONTEXT_TOKENS = 4
_OPTIONS = ("max_model_len", "max_num_seqs", "gpu_memory_utilization")
# Tokens and alternatives with log-probs that are encoded in a few milliseconds.
_SMALL_REPLY = 512
_NO_CACHE = {"Cache-Control": "no-cache"}

logger = logging.getLogger(__name__)


class OpenAIServer:
    """Serves an engine.

    `check` raises ValueError for a request that the engine can never run. Requests are parsed by `parsers`, in other
    processes, because all clients share this event loop.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        check: Callable[[Request], None],
        facts: ModelFacts,
        tokenizer: Any,
        parsers: Parsers[Ask],
    ) -> None:
        self._engine, self._check, self._facts = engine, check, facts
        self._tokenizer, self._parsers = tokenizer, parsers

    def app(self, max_body_bytes: int, api_key: str | None = None) -> ASGIApp:
        routes = [Route(path, self._generate, methods=["POST"]) for path in (COMPLETIONS, CHAT)]
        return create_model_app(routes, self._facts, lambda: self._engine.unfinished, max_body_bytes, api_key)

    async def _generate(self, http_request: HttpRequest) -> Response:
        path = http_request.scope["path"]
        ask = await self._parsers.parse(path, request_body(http_request), self._facts)
        requests = ask.requests(self._facts.max_model_len)
        with api_errors():
            for request in requests:
                self._check(request)
        if ask.params.grammar is not None:
            with api_errors("tools" if ask.begun else "response_format"):
                await asyncio.to_thread(self._engine.prepare, ask.params)
        chat = path == CHAT
        replies = Replies(ask, chat, self._tokenizer)
        choices = [_Choice(index, request, ask, chat, self._tokenizer) for index, request in enumerate(requests)]
        if not ask.stream:
            return await self._whole(ask, choices, replies)
        return GeneratorResponse(self._events(ask, choices, replies), media_type="text/event-stream", headers=_NO_CACHE)

    async def _whole(self, ask: Ask, choices: list[_Choice], replies: Replies) -> Response:
        """A small reply is encoded at once; the choices of a large one in a thread, one by one, while they are sent."""
        with api_errors(status=422):
            futures = self._engine.submit([choice.request for choice in choices])
            try:
                outputs = await asyncio.gather(*map(asyncio.wrap_future, futures))
            finally:
                # If one fails, the request fails: the others are not needed.
                for future in futures:
                    future.cancel()
        before, after = replies.frame(sum(map(_Choice.counted, choices, outputs)))
        results = list(zip(choices, outputs, strict=True))
        entries = sum(len(output.token_ids) for output in outputs) * (1 + ask.params.top_log_probs)
        if entries <= _SMALL_REPLY and not (ask.echoed or ask.tells_prompt):
            texts = [replies.choice(choice.take(output)) for choice, output in results]
            return Response(before + ", ".join(texts) + after, media_type="application/json")
        return GeneratorResponse(_encoded(results, replies, before, after), media_type="application/json")

    async def _events(self, ask: Ask, choices: list[_Choice], replies: Replies) -> AsyncGenerator[str, None]:
        """Server-sent events with the pieces of all choices as they are generated."""
        pieces: asyncio.Queue[tuple[_Choice, Output | Exception]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_forward(self._engine, choice, pieces)) for choice in choices]
        unfinished, sampled = len(choices), 0
        try:
            for choice in choices:
                first = replies.first_piece(choice.index)
                if first is not None:
                    yield _event(first)
            while unfinished:
                choice, piece = await pieces.get()
                if isinstance(piece, Exception):
                    with api_errors(status=422):
                        raise piece
                if choice.finished:
                    continue
                sampled += choice.counted(piece)
                part = choice.take(piece)
                if part.text or part.calls or part.finish_reason:
                    yield _event(replies.piece(part))
                    await asyncio.sleep(0)  # other clients are served between two pieces, however many are ready
                unfinished -= choice.finished
            if ask.include_usage:
                yield _event(replies.usage_piece(sampled))
            yield _event("[DONE]")
        except ApiError as error:
            yield _event(json.dumps(error.content, ensure_ascii=False))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Choice:
    """A response in progress: its text stream, and the tokens whose text is not sent yet."""

    def __init__(self, index: int, request: Request, ask: Ask, chat: bool, tokenizer: Any) -> None:
        self.index, self.request = index, request
        self.finished = False
        context = () if chat else request.prompt_ids[-_CONTEXT_TOKENS:]
        self._text = TextStream(tokenizer, request.params.stop, context)
        self._tools = ToolText(ask.begun) if ask.tools else None
        self._echoed = None if ask.echoed is None else ask.echoed[index // ask.n]
        self._scores_only, self._tells_prompt = ask.scores_only, ask.tells_prompt
        self._held: list[Token] = []
        self._offset = 0

    def counted(self, piece: Output) -> int:
        """Number of completion tokens in the piece, for `usage`."""
        return 0 if self._scores_only else len(piece.token_ids)

    def take(self, piece: Output) -> Part:
        """Process a piece of output (the last one has a finish reason); returns what to send."""
        text = ""
        if self._echoed is not None and piece.token_ids:
            text, self._echoed = self._echoed, None
            if self.request.params.prompt_log_probs:
                self._held += prompt_tokens(self.request.prompt_ids, piece)
        if not self._scores_only:
            self._held += sampled_tokens(piece)
            text += self._text.push(piece.token_ids)
        reason = piece.finish_reason or ("stop" if self._text.stopped else None)
        self.finished = reason is not None
        if self.finished and not self._scores_only:
            text += self._text.finish()
        part = Part(self.index, text, offset=self._offset, finish_reason=reason)
        if self._tells_prompt:
            part.prompt = prompt_tokens(self.request.prompt_ids, piece)
        if self._tools is not None:
            part.text, part.calls = self._tools.push(text, last=self.finished)
            if self._tools.calls and reason == "stop":
                part.finish_reason = "tool_calls"
        if part.text or part.calls or part.finish_reason:
            part.tokens, self._held = self._held, []
            self._offset += len(part.text)
        return part


async def _encoded(
    results: list[tuple[_Choice, Output]], replies: Replies, before: str, after: str
) -> AsyncGenerator[str, None]:
    """The JSON of a complete response in pieces: log-probs may take megabytes."""
    for choice, output in results:
        text = await asyncio.to_thread(lambda c=choice, o=output: replies.choice(c.take(o)))  # type: ignore[misc]
        yield before + text
        before = ", "
    yield after


def _event(data: str) -> str:
    return f"data: {data}\n\n"


async def _forward(
    engine: AsyncEngine, choice: _Choice, pieces: asyncio.Queue[tuple[_Choice, Output | Exception]]
) -> None:
    try:
        async for piece in engine.stream(choice.request):
            pieces.put_nowait((choice, piece))
    except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
        pieces.put_nowait((choice, error))


def in_options(message: str) -> str:
    """Rename config fields in an engine's error message to command-line options."""
    return rename_fields(message, _OPTIONS, lambda name: f"--{name.replace('_', '-')}")


@contextlib.contextmanager
def api_errors(param: str | None = None, status: int = 400) -> Iterator[None]:
    """Convert exceptions of the engine to API errors.

    A ValueError is the fault of the request: it gets `status`, and `param` is the field that caused it.
    """
    try:
        yield
    except ValueError as error:
        raise ApiError(in_options(str(error)), param, status) from error
    except FloatingPointError as error:  # affects this request only
        logger.error("a request failed: %s", error)
        raise ApiError(str(error), status=500) from error
    except Exception as error:
        logger.exception("a request failed")
        raise ApiError(f"the engine failed: {error}", status=500) from error
