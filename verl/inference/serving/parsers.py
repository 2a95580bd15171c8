"""Parsers: parse requests of clients (JSON, chat template, tokens, grammar) in processes with limits."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from verl.inference.serving.api import ApiError
from verl.inference.serving.openai_requests import HeavyRequest, ModelInfo
from verl.utils.tokenizer import TextWorkers, TextWorkersBusy, TextWorkLimit

__all__ = ["Parsers", "text_work_error"]

T = TypeVar("T")

# Larger bodies are parsed as heavy requests. Up to this size, parsing takes milliseconds unless it runs a program.
_LIGHT_BODY = 512 * 1024


class Parsers(Generic[T]):
    """Parses requests in processes that have the tokenizer; a request may take `seconds` and 2 GB.

    `parse(path, body, model_info, tokenizer, heavy)` returns the parsed request or raises an ApiError. With
    `heavy=False` it raises HeavyRequest instead of running a program of the client (a chat template or a grammar). It
    is then called again with `heavy=True`, in one of the processes for heavy requests; large bodies are parsed there at
    once. So slow requests delay only each other.
    """

    def __init__(
        self, parse: Callable[[str, bytes, ModelInfo, Any, bool], T], load_tokenizer: Callable[[], Any], seconds: float
    ) -> None:
        self._parse = parse
        self._workers = TextWorkers(load_tokenizer, seconds, functions=[parse])

    def wait_until_ready(self) -> None:
        """Wait until requests can be parsed; raises the error of loading the tokenizer."""
        self._workers.start()

    async def parse(self, path: str, body: bytes | bytearray, model_info: ModelInfo) -> T:
        """Parse a request. ApiError: 400 if it is invalid, 503 if too many heavy requests are waiting."""
        buffer = pickle.PickleBuffer(body)
        try:
            if len(body) <= _LIGHT_BODY:
                try:
                    return await self._workers.call(_parse, self._parse, path, buffer, model_info, False)
                except HeavyRequest:
                    pass
            return await self._workers.call(_parse, self._parse, path, buffer, model_info, True, heavy=True)
        except (TextWorkLimit, TextWorkersBusy) as error:
            raise text_work_error(error) from error

    def close(self) -> None:
        self._workers.close()


def text_work_error(error: TextWorkLimit | TextWorkersBusy) -> ApiError:
    """The error response for a request whose text work was stopped (400) or could not be queued (503)."""
    if isinstance(error, TextWorkersBusy):
        return ApiError(f"{error}. Try again later.", status=503, code="text_workers_busy")
    return ApiError(str(error), code="text_work_limit")


def _parse(
    tokenizer: Any,
    parse: Callable[[str, bytes, ModelInfo, Any, bool], T],
    path: str,
    body: bytes,
    model_info: ModelInfo,
    heavy: bool,
) -> T:
    return parse(path, body, model_info, tokenizer, heavy)
