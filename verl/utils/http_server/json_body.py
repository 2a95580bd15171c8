"""JSON bodies of requests, parsed and validated with limits; large ones in worker processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from verl.utils.http_server.app import HttpError
from verl.utils.process_pool import LOW_PRIORITY, ProcessDied, ProcessPool, TaskTimeout

__all__ = ["BodyParser", "RequestModel", "parse_json", "parse_model", "validate_model", "validation_message"]

Model = TypeVar("Model", bound=BaseModel)
_LONG_NUMBER = re.compile(rb"\d{19}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_INTEGER_LIMIT = 2**64
_INLINE_BYTES, _VERY_LARGE_BYTES = 256 << 10, 2 << 20
_MOST_PENDING = 64
_SECONDS = 10.0
_MEMORY_BYTES, _GROWTH_BYTES = 1 << 30, 4 << 20
_SHOWN = 200


class RequestModel(BaseModel):
    """Base of request models: exact JSON types (true is not 1, "1" is not 1), finite numbers, null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping):
            return {name: value for name, value in fields.items() if value is not None}
        return fields


def parse_json(body: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8: no NaN, no infinite or more than 64-bit numbers, no lone surrogates. HttpError 400 if not.

    The limits hold for every number in the body, also inside fields that are passed on without validation.
    """
    try:
        parse_int = _bounded_int if _LONG_NUMBER.search(body) else None
        content = json.loads(
            body.decode(), parse_int=parse_int, parse_float=_finite_float, parse_constant=_reject_constant
        )
        if _SURROGATE.search(body):
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError as error:
        raise HttpError(400, "the body is not valid JSON for this server: it is nested too deeply.") from error
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not valid JSON: it is not UTF-8 (byte {error.start}).") from error
    except UnicodeEncodeError as error:
        raise HttpError(
            400, "the body contains a lone surrogate (such as \\ud800), which is not a character."
        ) from error
    except ValueError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}.") from error
    return content


def _bounded_int(digits: str) -> int:
    count = len(digits.removeprefix("-"))
    if count > 20 or abs(int(digits)) >= _INTEGER_LIMIT:
        raise ValueError(f"the number {digits[:20]}… ({count} digits) does not fit in 64 bits")
    return int(digits)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def validate_model(model: type[Model], content: Any, status: int = 422) -> Model:
    """Validate parsed JSON; HttpError names the first wrong field, its value and what is expected."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        message, param = validation_message(error)
        raise HttpError(status, message, param=param) from error


def validation_message(error: ValidationError) -> tuple[str, str | None]:
    """(message, name of the field) of the first problem."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"] if part != "__root__")[:_SHOWN]
    if problem["type"] == "missing":
        return f"{place}: is missing.", place or None
    shown = json.dumps(problem["input"], ensure_ascii=False, default=repr) if problem["type"] != "model_type" else ""
    reason = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")
    if problem["type"] == "extra_forbidden":
        return f"{place}: unknown field.", place
    shown = f" (got {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'})" if shown else ""
    return f"{place or 'the body'}: {reason}{shown}.", place or None


def parse_model(model: type[Model], body: bytes | bytearray) -> Model:
    return validate_model(model, parse_json(body))


def _prepare(_models: tuple[type[BaseModel], ...]) -> None:
    os.nice(LOW_PRIORITY)


class BodyParser:
    """Parses bodies in the event loop if they are small, otherwise in a process with limits on time and memory.

    Parsing holds the interpreter's lock, and a few megabytes of JSON can take seconds and gigabytes. Very large bodies
    use one of the two processes, so that the others do not wait for them.
    """

    def __init__(self, *models: type[BaseModel]) -> None:
        """`models` are imported before the processes fork, so that they share the memory."""
        self._pool = ProcessPool(
            2,
            initializer=partial(_prepare, models),
            memory_limit=_MEMORY_BYTES,
            max_growth=_GROWTH_BYTES,
            prefork=True,
        )
        self._pool.submit(parse_json, b"0")  # starts it now: in the event loop, clients would wait for that
        self._very_large = asyncio.Semaphore(1)
        self._pending = 0

    async def parse(self, model: type[Model], body: bytes | bytearray) -> Model:
        if len(body) <= _INLINE_BYTES:
            return parse_model(model, body)
        if self._pending >= _MOST_PENDING:
            raise HttpError(503, "too many large requests are waiting. Try again later.")
        self._pending += 1
        try:
            if len(body) <= _VERY_LARGE_BYTES:
                return await self._parse(model, body)
            async with self._very_large:
                return await self._parse(model, body)
        finally:
            self._pending -= 1

    async def _parse(self, model: type[Model], body: bytes | bytearray) -> Model:
        try:
            task = self._pool.submit(parse_model, model, pickle.PickleBuffer(body), timeout=_SECONDS)
            parsed: Model = await asyncio.wrap_future(task)
        except TaskTimeout as error:
            raise HttpError(400, f"the body could not be parsed within {_SECONDS:g} s. Shorten it.") from error
        except (MemoryError, ProcessDied) as error:
            raise HttpError(400, "parsing the body takes too much memory. Shorten it.") from error
        return parsed

    def close(self) -> None:
        self._pool.close()
