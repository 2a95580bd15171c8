"""The OpenAI API on an engine: /v1/completions, /v1/chat/completions, /v1/models, /health."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from verl.inference.async_engine import AsyncEngine
from verl.inference.serving.http_server import EventStream, HttpRequest, Reply
from verl.inference.serving.openai_replies import Replies, usage
from verl.inference.serving.openai_requests import ApiError, Ask, ModelFacts, parse_chat, parse_completion, parse_json
from verl.inference.serving.text_stream import TextStream
from verl.types.request import Output, Request
from verl.utils.field_errors import respelled

__all__ = ["OpenAIApp", "in_options"]

_PARSERS = {"/v1/completions": parse_completion, "/v1/chat/completions": parse_chat}
# Enough tokens before an answer for a decoder to know that a word does not begin the text.
_CONTEXT_TOKENS = 4
_DONE = "[DONE]"
_OPTIONS = ("max_model_len", "max_num_seqs", "gpu_memory_utilization")

logger = logging.getLogger(__name__)


class OpenAIApp:
    """Answers HTTP requests with an engine's tokens. With an `api_key`, only who sends it is answered.

    `check` raises a ValueError for a request that the engine can never answer.
    """

    def __init__(
        self, engine: AsyncEngine, check: Callable[[Request], None], facts: ModelFacts, api_key: str | None = None
    ) -> None:
        self._engine, self._check, self._facts, self._api_key = engine, check, facts, api_key
        self._since = int(time.time())

    async def handle(self, request: HttpRequest) -> Reply | EventStream:
        try:
            return await self._answer(request)
        except ApiError as error:
            return Reply(error.status, error.content)

    async def _answer(self, request: HttpRequest) -> Reply | EventStream:
        path = request.path.rstrip("/")
        if path == "/health" and request.method == "GET":
            return Reply(200, {"status": "ok", "unfinished_requests": self._engine.unfinished})
        self._check_key(request)
        if path in _PARSERS:
            _check_method(request, "POST")
            given = parse_json(request.headers.get("content-type", ""), request.body)
            return await self._generate(path, given)
        if path == "/v1/models" or path.startswith("/v1/models/"):
            _check_method(request, "GET")
            return Reply(200, self._models(path.removeprefix("/v1/models").lstrip("/")))
        known = ", ".join(("/health", "/v1/models", *_PARSERS))
        raise ApiError(f"there is no {request.method} {request.path}. There are {known}.", status=404)

    def _check_key(self, request: HttpRequest) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise ApiError("Incorrect API key provided.", status=401, code="invalid_api_key")

    def _models(self, name: str) -> dict[str, Any]:
        entries = [
            {"id": known, "object": "model", "created": self._since, "owned_by": "verl"} for known in self._facts.names
        ]
        if not name:
            return {"object": "list", "data": entries}
        found = next((entry for entry in entries if entry["id"] == name), None)
        if found is None:
            raise ApiError(f"The model {name!r} does not exist.", "model", 404, "model_not_found")
        return found

    # ---------------------------------------------------------------- generating

    async def _generate(self, path: str, given: dict[str, Any]) -> Reply | EventStream:
        ask = _PARSERS[path](given, self._facts)
        chat = path == "/v1/chat/completions"
        replies = Replies(chat, given.get("model") or self._facts.names[0], self._facts.tokenizer, ask.log_probs)
        requests = ask.requests(self._facts.max_model_len)
        with _as_api_errors():
            for request in requests:
                self._check(request)
        choices = [_Choice(index, request, self._text_stream(request, chat)) for index, request in enumerate(requests)]
        if ask.stream:
            return EventStream(self._events(ask, choices, replies))
        return Reply(200, await self._whole(ask, choices, replies))

    async def _whole(self, ask: Ask, choices: list[_Choice], replies: Replies) -> dict[str, Any]:
        with _as_api_errors():
            futures = self._engine.submit([choice.request for choice in choices])
            try:
                outputs = await asyncio.gather(*map(asyncio.wrap_future, futures))
            finally:
                # One that failed fails the request; the others must not go on for nobody.
                for future in futures:
                    future.cancel()
        made = []
        for choice, output in zip(choices, outputs, strict=True):
            text = choice.text.push(output.token_ids) + choice.text.finish()
            made.append(replies.choice(choice.index, text, output))
        return replies.whole(made, _usage(ask, sum(len(output.token_ids) for output in outputs)))

    async def _events(self, ask: Ask, choices: list[_Choice], replies: Replies) -> AsyncGenerator[str, None]:
        """Pieces of all answers, as they come."""
        pieces: asyncio.Queue[tuple[_Choice, Output | Exception]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_forward(self._engine, choice, pieces)) for choice in choices]
        unfinished, sampled = len(choices), 0
        try:
            for choice in choices:
                first = replies.first_piece(choice.index)
                if first is not None:
                    yield first
            while unfinished:
                choice, piece = await pieces.get()
                if isinstance(piece, Exception):
                    with _as_api_errors():
                        raise piece
                if choice.finished:
                    continue
                sampled += len(piece.token_ids)
                event = choice.take(piece, replies)
                if event is not None:
                    yield event
                unfinished -= choice.finished
            if ask.include_usage:
                yield replies.usage_piece(_usage(ask, sampled))
            yield _DONE
        except ApiError as error:
            yield json.dumps(error.content, ensure_ascii=False)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _text_stream(self, request: Request, chat: bool) -> TextStream:
        context = () if chat else request.prompt_ids[-_CONTEXT_TOKENS:]
        return TextStream(self._facts.tokenizer, request.params.stop, context)


class _Choice:
    """One answer under way: its text so far, and the tokens whose text is not out yet."""

    def __init__(self, index: int, request: Request, text: TextStream) -> None:
        self.index, self.request, self.text = index, request, text
        self.finished = False
        self._held = Output()
        self._offset = 0

    def take(self, piece: Output, replies: Replies) -> str | None:
        """What to send for this piece; None: nothing yet."""
        self._held.token_ids += piece.token_ids
        self._held.raw_log_probs += piece.raw_log_probs
        text = self.text.push(piece.token_ids)
        reason = piece.finish_reason or ("stop" if self.text.stopped else None)
        if reason is not None:
            text += self.text.finish()
            self.finished = True
        elif not text:
            return None
        told, self._held = self._held, Output()
        event = replies.piece(self.index, text, told, self._offset, reason)
        self._offset += len(text)
        return event


async def _forward(
    engine: AsyncEngine, choice: _Choice, pieces: asyncio.Queue[tuple[_Choice, Output | Exception]]
) -> None:
    try:
        async for piece in engine.stream(choice.request):
            pieces.put_nowait((choice, piece))
    except Exception as error:  # noqa: BLE001 - whoever reads the pieces gets it
        pieces.put_nowait((choice, error))


def in_options(message: str) -> str:
    """An error of the engine in the words of this program: its fields are command-line options."""
    return respelled(message, _OPTIONS, lambda name: f"--{name.replace('_', '-')}")


@contextlib.contextmanager
def _as_api_errors() -> Iterator[None]:
    """What the engine raises, as a client is told."""
    try:
        yield
    except ValueError as error:
        raise ApiError(in_options(str(error))) from error
    except Exception as error:
        logger.exception("a request failed")
        raise ApiError(f"the engine failed: {error}", status=500) from error


def _usage(ask: Ask, completion_tokens: int) -> dict[str, int]:
    return usage(sum(map(len, ask.prompts)), completion_tokens)


def _check_method(request: HttpRequest, method: str) -> None:
    if request.method != method:
        raise ApiError(f"{request.method} {request.path}: use {method}.", status=405)
