"""The OpenAI API of an engine: /v1/completions, /v1/chat/completions, LoRA adapters, /v1/models, /health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from verl.inference.async_engine import AsyncEngine
from verl.inference.lora import LoraError, LoraRegistry, UnknownAdapterError
from verl.inference.serving.api import ApiError, create_model_app
from verl.inference.serving.openai_requests import CHAT, COMPLETIONS, ModelInfo, ParsedRequest
from verl.inference.serving.openai_responses import ResponseChunk, ResponseEncoder, Token, prompt_tokens, sampled_tokens
from verl.inference.serving.parsers import Parsers
from verl.inference.serving.response_text import TextStream, ToolCallSplitter
from verl.types.request import Output, Request
from verl.utils.exceptions import rename_fields
from verl.utils.http_server.app import GeneratorResponse, request_body
from verl.utils.http_server.json_body import parse_json

__all__ = ["OpenAIServer", "api_errors", "in_options", "lora_routes"]

# Prompt tokens decoded with a response: decoders drop the space in front of the first word of a text.
_CONTEXT_TOKENS = 4
_OPTIONS = ("max_model_len", "max_num_seqs", "gpu_memory_utilization")
# Number of log-probs up to which encoding a response takes only a few milliseconds.
_SMALL_RESPONSE = 512
# Characters of an adapter's name.
_MAX_NAME = 200
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
        model_info: ModelInfo,
        tokenizer: Any,
        parsers: Parsers[ParsedRequest],
        loras: LoraRegistry | None = None,
        lora_root: Path | None = None,
    ) -> None:
        """`loras`: the LoRA adapters that requests select as their `model`; None: they cannot be loaded. Clients load
        adapters from folders below `lora_root` (None: from any folder)."""
        self._loras, self._lora_root = loras, lora_root
        self._engine, self._check, self._model_info = engine, check, model_info
        self._tokenizer, self._parsers = tokenizer, parsers

    def app(self, max_body_bytes: int, api_key: str | None = None) -> ASGIApp:
        routes = [Route(path, self._generate, methods=["POST"]) for path in (COMPLETIONS, CHAT)]
        if self._loras is not None:
            routes += lora_routes(self._loras, self._lora_root)
        return create_model_app(routes, self._current_info, lambda: self._engine.unfinished, max_body_bytes, api_key)

    def _current_info(self) -> ModelInfo:
        """The limits of the model, with the names of the loaded adapters."""
        adapters = tuple(self._engine.adapters)
        return replace(self._model_info, names=self._model_info.names + adapters) if adapters else self._model_info

    async def _generate(self, http_request: HttpRequest) -> Response:
        path = http_request.scope["path"]
        parsed = await self._parsers.parse(path, request_body(http_request), self._current_info())
        adapter = None if parsed.model in self._model_info.names else parsed.model
        requests = parsed.requests(self._model_info.max_model_len, adapter)
        with api_errors():
            for request in requests:
                self._check(request)
        if parsed.params.grammar is not None:
            with api_errors("tools" if parsed.forced_prefix else "response_format"):
                await asyncio.to_thread(self._engine.prepare, parsed.params)
        chat = path == CHAT
        encoder = ResponseEncoder(parsed, chat, self._tokenizer)
        choices = [_Choice(index, request, parsed, chat, self._tokenizer) for index, request in enumerate(requests)]
        if not parsed.stream:
            return await self._complete(parsed, choices, encoder)
        return GeneratorResponse(
            self._events(parsed, choices, encoder), media_type="text/event-stream", headers=_NO_CACHE
        )

    async def _complete(self, parsed: ParsedRequest, choices: list[_Choice], encoder: ResponseEncoder) -> Response:
        """Generate all choices and encode them; a large response in a thread, choice by choice, while it is sent."""
        with api_errors(status=422):
            futures = self._engine.submit([choice.request for choice in choices])
            try:
                outputs = await asyncio.gather(*map(asyncio.wrap_future, futures))
            finally:
                # If one choice fails, the whole request fails.
                for future in futures:
                    future.cancel()
        before, after = encoder.frame(sum(map(_Choice.count_tokens, choices, outputs)))
        results = list(zip(choices, outputs, strict=True))
        entries = sum(len(output.token_ids) for output in outputs) * (1 + parsed.params.top_log_probs)
        if entries <= _SMALL_RESPONSE and not (parsed.echoed or parsed.returns_prompt_log_probs):
            texts = [encoder.choice(choice.process(output)) for choice, output in results]
            return Response(before + ", ".join(texts) + after, media_type="application/json")
        return GeneratorResponse(_encode_choices(results, encoder, before, after), media_type="application/json")

    async def _events(
        self, parsed: ParsedRequest, choices: list[_Choice], encoder: ResponseEncoder
    ) -> AsyncGenerator[str, None]:
        """Server-sent events with the chunks of all choices as they are generated."""
        pieces: asyncio.Queue[tuple[_Choice, Output | Exception]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_forward(self._engine, choice, pieces)) for choice in choices]
        unfinished, sampled = len(choices), 0
        try:
            for choice in choices:
                first = encoder.first_chunk(choice.index)
                if first is not None:
                    yield _event(first)
            while unfinished:
                choice, piece = await pieces.get()
                if isinstance(piece, Exception):
                    with api_errors(status=422):
                        raise piece
                if choice.finished:
                    continue
                sampled += choice.count_tokens(piece)
                chunk = choice.process(piece)
                if chunk.text or chunk.calls or chunk.finish_reason:
                    yield _event(encoder.chunk(chunk))
                unfinished -= choice.finished
            if parsed.include_usage:
                yield _event(encoder.usage_chunk(sampled))
            yield _event("[DONE]")
        except ApiError as error:
            yield _event(json.dumps(error.content, ensure_ascii=False))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Choice:
    """One response of a request while it is generated: its text stream, and the tokens whose text is not sent yet."""

    def __init__(self, index: int, request: Request, parsed: ParsedRequest, chat: bool, tokenizer: Any) -> None:
        self.index, self.request = index, request
        self.finished = False
        context = () if chat else request.prompt_ids[-_CONTEXT_TOKENS:]
        self._text = TextStream(tokenizer, request.params.stop, context)
        self._tools = ToolCallSplitter(parsed.forced_prefix) if parsed.tools else None
        self._echoed = None if parsed.echoed is None else parsed.echoed[index // parsed.n]
        self._scores_only, self._returns_prompt_log_probs = parsed.scores_only, parsed.returns_prompt_log_probs
        self._unsent: list[Token] = []
        self._offset = 0

    def count_tokens(self, piece: Output) -> int:
        """Number of completion tokens in the piece, for `usage`."""
        return 0 if self._scores_only else len(piece.token_ids)

    def process(self, piece: Output) -> ResponseChunk:
        """Process a piece of output (the last one has a finish reason); returns the chunk to send."""
        text = ""
        if self._echoed is not None and piece.token_ids:
            text, self._echoed = self._echoed, None
            if self.request.params.prompt_log_probs:
                self._unsent += prompt_tokens(self.request.prompt_ids, piece)
        if not self._scores_only:
            self._unsent += sampled_tokens(piece)
            text += self._text.push(piece.token_ids)
        reason = piece.finish_reason or ("stop" if self._text.stopped else None)
        self.finished = reason is not None
        if self.finished and not self._scores_only:
            text += self._text.finish()
        chunk = ResponseChunk(self.index, text, offset=self._offset, finish_reason=reason)
        if self._returns_prompt_log_probs:
            chunk.prompt = prompt_tokens(self.request.prompt_ids, piece)
        if self._tools is not None:
            chunk.text, chunk.calls = self._tools.push(text, last=self.finished)
            if self._tools.num_calls and reason == "stop":
                chunk.finish_reason = "tool_calls"
        if chunk.text or chunk.calls or chunk.finish_reason:
            chunk.tokens, self._unsent = self._unsent, []
            self._offset += len(chunk.text)
        return chunk


async def _encode_choices(
    results: list[tuple[_Choice, Output]], encoder: ResponseEncoder, before: str, after: str
) -> AsyncGenerator[str, None]:
    """The JSON of a complete response, choice by choice: log-probs may take megabytes."""
    for choice, output in results:
        text = await asyncio.to_thread(lambda c=choice, o=output: encoder.choice(c.process(o)))  # type: ignore[misc]
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
    """Replace names of config fields in an error message of the engine by command-line options."""
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
    except FloatingPointError as error:  # the log-probs of this request are not finite; others are not affected
        logger.error("a request failed: %s", error)
        raise ApiError(str(error), status=500) from error
    except Exception as error:
        logger.exception("a request failed")
        raise ApiError(f"the engine failed: {error}", status=500) from error


def lora_routes(loras: LoraRegistry, root: Path | None) -> list[Route]:
    """Routes that load and unload adapters, as in vLLM. Adapters are in folders below `root` (None: in any folder)."""
    # One adapter at a time: requests that wait must not occupy the threads of other requests.
    loading = asyncio.Lock()

    async def load(request: HttpRequest) -> Response:
        name, path = _read_fields(request, ("lora_name", "lora_path"))
        try:
            async with loading:
                await asyncio.to_thread(loras.load, name, path, root)
        except LoraError as error:
            raise ApiError(str(error), error.field) from error
        logger.info("loaded the LoRA adapter %r from %r", name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: HttpRequest) -> Response:
        (name,) = _read_fields(request, ("lora_name",))
        try:
            async with loading:
                await asyncio.to_thread(loras.unload, name)
        except UnknownAdapterError as error:
            raise ApiError(str(error), error.field, 404, "model_not_found") from error
        logger.info("unloaded the LoRA adapter %r", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


def _read_fields(request: HttpRequest, names: Sequence[str]) -> list[str]:
    """The values of these fields of a JSON body, which may also have vLLM's `lora_int_id`."""
    fields: Any = parse_json(bytes(request_body(request)))
    if not isinstance(fields, dict):
        raise ApiError("The body must be a JSON object.")
    unknown = sorted(fields.keys() - {*names, "lora_int_id"})
    if unknown:
        raise ApiError(f"{unknown[0][:_MAX_NAME]}: unknown field. Use {', '.join(names)}.", unknown[0][:_MAX_NAME])
    for name in names:
        value = fields.get(name)
        if not isinstance(value, str) or not value:
            raise ApiError(f"{name}: should be a non-empty string.", name)
        if name == "lora_name" and len(value) > _MAX_NAME:
            raise ApiError(f"{name}: has {len(value)} characters; at most {_MAX_NAME} are allowed.", name)
    return [fields[name] for name in names]
