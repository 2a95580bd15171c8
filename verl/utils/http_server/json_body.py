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
# Digits of a number that may not fit in 64 bits.
_LONG_NUMBER = re.compile(rb"\d{19}")
# Escape of a surrogate, which may be lone: \ud800 to \udfff.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_INTEGERS = range(-(2**63), 2**64)
# Up to the first size, a body is parsed in the event loop; above the second, only one at a time (`BodyParser`).
_INLINE_BYTES, _VERY_LARGE_BYTES = 256 << 10, 2 << 20
_PROCESSES = 2
# Maximum number of bodies that are in processes or wait for one.
_MAX_PENDING = 64
PARSE_TIMEOUT_S = 10.0
# Memory that parsing a body may allocate; a process that has grown by more than the second value is replaced.
MEMORY_BYTES, _MAX_GROWTH_BYTES = 1 << 30, 4 << 20
# Maximum number of characters of a client's value in an error message.
_MAX_SHOWN = 200


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
    """Parse JSON in UTF-8. HttpError 400 for invalid JSON, NaN, numbers beyond 64 bits, and lone surrogates.

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
    if count > 20 or int(digits) not in _INTEGERS:
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
    """Return the message of the first problem, and the path of its field (None: the whole body)."""
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"] if part != "__root__")[:_MAX_SHOWN]
    if problem["type"] == "missing":
        return f"{field}: is missing.", field or None
    if problem["type"] == "extra_forbidden":
        return f"{field}: unknown field.", field
    reason = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")
    shown = ""
    if problem["type"] != "model_type":  # the value would be the whole object
        value = json.dumps(problem["input"], ensure_ascii=False, default=repr)
        shown = f" (got {value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + '…'})"
    return f"{field or 'the body'}: {reason}{shown}.", field or None


def parse_model(model: type[Model], body: bytes | bytearray) -> Model:
    """Parse and validate a body; HttpError 400 for invalid JSON, 422 for other values than the model permits."""
    return validate_model(model, parse_json(body))


def _prepare(_models: tuple[type[BaseModel], ...]) -> None:
    """Initialize a process. Unpickling `_models` has imported their modules."""
    os.nice(LOW_PRIORITY)


class BodyParser:
    """Parses bodies in the event loop if they are small, otherwise in a process with limits on time and memory.

    Parsing holds the interpreter's lock, and a few megabytes of JSON can take seconds and gigabytes. Very large bodies
    use one of the two processes, so that the others do not wait for them.
    """

    def __init__(self, *models: type[BaseModel]) -> None:
        """`models` are imported before the processes fork, so that they share the memory."""
        self._pool = ProcessPool(
            _PROCESSES,
            initializer=partial(_prepare, models),
            memory_limit=MEMORY_BYTES,
            max_growth=_MAX_GROWTH_BYTES,
            prefork=True,
        )
        self._pool.submit(parse_json, b"0")  # starts the processes now; during a request, the event loop would block
        self._very_large = asyncio.Semaphore(1)
        self._pending = 0

    async def parse(self, model: type[Model], body: bytes | bytearray) -> Model:
        """As `parse_model`; also HttpError 503 if too many large bodies are waiting, or processes were killed."""
        if len(body) <= _INLINE_BYTES:
            return parse_model(model, body)
        if self._pending >= _MAX_PENDING:
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
            task = self._pool.submit(parse_model, model, pickle.PickleBuffer(body), timeout=PARSE_TIMEOUT_S)
            parsed: Model = await asyncio.wrap_future(task)
        except TaskTimeout as error:
            raise HttpError(400, f"the body could not be parsed within {PARSE_TIMEOUT_S:g} s. Shorten it.") from error
        except MemoryError as error:
            raise HttpError(400, "parsing the body takes too much memory. Shorten it.") from error
        except ProcessDied as error:
            reason = f"the body could not be parsed: its process {error.process_end}"
            if error.external:
                raise HttpError(503, f"{reason}. Try again later.") from error
            raise HttpError(400, f"{reason}. Shorten it, or try again.") from error
        return parsed

    def close(self) -> None:
        self._pool.close()
