"""Parsers: what clients wrote is read in killable processes.

A chat template is a program that holds the interpreter's lock, and what a tokenizer takes grows with the text: neither
can be stopped inside a thread, and neither may keep the server from answering others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from verl.inference.serving.fields import ApiError
from verl.inference.serving.openai_requests import ModelFacts
from verl.utils.process_pool import ProcessDied, ProcessPool, TaskTimeout

__all__ = ["Parsers"]

T = TypeVar("T")
_MEMORY = 2 * 2**30

# In a parser's process: the tokenizer.
_tokenizer: Any = None


class Parsers(Generic[T]):
    """Some processes with the tokenizer; a request may take `seconds` in one of them, and 2 GB.

    `read(path, body, facts, tokenizer)` says what a request asks for, or raises an ApiError.
    """

    def __init__(
        self,
        read: Callable[[str, bytes, ModelFacts, Any], T],
        load_tokenizer: Callable[[], Any],
        seconds: float,
        processes: int = 2,
    ) -> None:
        self._read, self._seconds = read, seconds
        self._pool = ProcessPool(processes, initializer=partial(_load, load_tokenizer), memory_limit=_MEMORY)
        self._ready = self._pool.submit(_is_loaded)

    def wait_until_ready(self) -> None:
        """Return when requests can be read; raises what keeps the tokenizer from being loaded."""
        assert self._ready.result()

    async def parse(self, path: str, body: bytes, facts: ModelFacts) -> T:
        """What a request asks for, or the ApiError that it gets."""
        try:
            asked = self._pool.submit(_parse, self._read, path, body, facts, timeout=self._seconds)
            return await asyncio.wrap_future(asked)
        except TaskTimeout as error:
            raise ApiError(f"the request could not be read in {self._seconds:g} s. Shorten it.") from error
        except (MemoryError, ProcessDied) as error:
            raise ApiError("the request takes too much memory to be read. Shorten it.") from error

    def close(self) -> None:
        self._pool.close()


def _load(load_tokenizer: Callable[[], Any]) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process that forks has no threads
    _tokenizer = load_tokenizer()


def _is_loaded() -> bool:
    return _tokenizer is not None


def _parse(read: Callable[[str, bytes, ModelFacts, Any], T], path: str, body: bytes, facts: ModelFacts) -> T:
    return read(path, body, facts, _tokenizer)
