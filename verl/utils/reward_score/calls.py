"""Calls of a reward function in a scorer process: one row, rows of an async function, or a list of rows.

A call that does not end its process returns a value with extra fields, or an error. The last section creates responses
whose score is known in advance, for checks of a reward function: correct ones, and ones that list many answers.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import pickle
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.utils.concurrency import SharedEventLoop
from verl.utils.process_pool.fork_server import TaskTimeout
from verl.utils.reward_score import registry
from verl.utils.reward_score.registry import score_function

# Kinds of errors, counted by `workers.reward_manager.scorer.error_metrics`: reward/errors/timeout, …
ERROR_KINDS = RAISED, INVALID, MEMORY, TIMEOUT, DIED = ("raised", "invalid", "memory", "timeout", "died")
# Result of a row: value, extra fields, error message, kind of error.
ScoreFields = tuple[float, dict[str, Any], str | None, str | None]
RewardArguments = Mapping[str, Any]

# Precedes each message: the number of the call, and the size of the content in bytes. The content of the first message
# is the process id.
HEADER = struct.Struct("<QI")
# Lines of a traceback in an error message, from its end.
_TRACE_LINES = 6
_loaded: Callable[[Any], Any]
_loop = SharedEventLoop("rewards")


def load_function(score: Callable[[Any], Any], user_functions: dict[str, registry.ScoreFunction]) -> None:
    """In a scorer process: set the function that `call_loaded_function` calls, and register the functions of users."""
    global _loaded
    _loaded = score
    registry.register_all(user_functions)


def call_loaded_function(row: Any) -> Any:
    """In a scorer process: return the loaded function's result (of an async function, its coroutine)."""
    return _loaded(row)


def score_row(function: Callable[..., Any], row: RewardArguments) -> ScoreFields:
    """Call the function for one row. Exceptions become the row's error, except MemoryError, which ends the process."""
    try:
        return parse_result(_run_if_coroutine(registry.call_with_accepted(function, **row)))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - counted and shown by the reward manager
        return 0.0, {}, last_lines(traceback.format_exc()), RAISED


async def score_row_async(function: Callable[..., Any], row: RewardArguments) -> ScoreFields:
    """Like `score_row`, for an async function."""
    try:
        call: Any = registry.call_with_accepted(function, **row)
        return parse_result(await call)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - counted and shown by the reward manager
        return 0.0, {}, last_lines(traceback.format_exc()), RAISED


def score_rows_concurrently(function: Callable[..., Any], rows: Sequence[RewardArguments]) -> list[ScoreFields]:
    """Call an async function for all rows concurrently."""

    async def score_all() -> list[ScoreFields]:
        return await asyncio.gather(*(score_row_async(function, row) for row in rows))

    return _loop.run(score_all())


def _run_if_coroutine(result: Any) -> Any:
    """Return the result of a coroutine; any other value unchanged."""
    return _loop.run(result) if inspect.iscoroutine(result) else result


def score_batch(function: Callable[..., Any], rows: Sequence[RewardArguments]) -> tuple[ScoreFields, ...]:
    """Score all rows in one call: `function(data_sources, solution_strs, ground_truths, extra_infos)` returns a list.

    The function may omit any of these parameters. If the call raises, every row gets the error.
    """
    parameters = inspect.signature(function).parameters
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    lists = {f"{name}s": [row[name] for row in rows] for name in rows[0]}
    try:
        returned = _run_if_coroutine(
            function(**{name: values for name, values in lists.items() if accepts_any or name in parameters})
        )
        if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
            raise TypeError(
                f"a list of {len(rows)} scores is expected; the function returned a {type(returned).__name__}"
            )
        if len(returned) != len(rows):
            raise ValueError(f"the function returned {len(returned)} scores for {len(rows)} responses")
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - counted and shown by the reward manager
        return ((0.0, {}, call_error(len(rows), last_lines(traceback.format_exc())), RAISED),) * len(rows)
    return tuple(map(parse_result, returned))


def call_error(count: int, error: str) -> str:
    """Return the error message for each row of a failed call."""
    return f"the call with its {count} responses failed: {error}"


def last_lines(trace: str) -> str:
    """Shorten a traceback to the lines that name the error."""
    return "".join(trace.splitlines(keepends=True)[-_TRACE_LINES:]).strip()


def parse_result(result: Any) -> ScoreFields:
    """Convert the result of a reward function: a finite number, or a dict with one under `score`."""
    extra: dict[str, Any] = {}
    number = result
    if type(result) is not float and isinstance(result, Mapping):
        extra = {str(name): value for name, value in result.items()}
        if "score" not in extra:
            names = ", ".join(extra)
            return invalid_result(f"the reward function returned a dict without 'score' (it has: {names})")
        number = extra["score"]
    try:
        if isinstance(number, str | bytes):
            raise TypeError("float() would parse it")
        value = float(number)
    except (TypeError, ValueError, OverflowError):
        kind = type(number).__name__
        return invalid_result(f"the reward function returned a {kind}, not a number: {str(number)[:80]!r}")
    if not math.isfinite(value):
        return invalid_result(f"the reward function returned {value}")
    return value, extra, None, None


def invalid_result(error: str) -> ScoreFields:
    """Return the result of a row without a valid score."""
    return 0.0, {}, error, INVALID


# -- async functions: an event loop in a scorer process runs all calls received on a socket concurrently ------------


def serve_calls(address: str, timeout: float) -> None:
    """Run the loaded function for each row received on the socket `address`, until the socket is closed.

    Calls run concurrently, each for at most `timeout` seconds; replies are sent in the order in which calls end.
    """
    asyncio.run(_serve_calls(address, timeout))


def pack_message(number: int, content: Any) -> bytes:
    """Return a message as bytes. Raises the errors of pickle."""
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(number, len(data)) + data


async def receive_message(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Return the number and content of the next message. Raises IncompleteReadError if the connection is closed."""
    number, size = HEADER.unpack(await reader.readexactly(HEADER.size))
    return number, pickle.loads(await reader.readexactly(size))


async def _serve_calls(address: str, timeout: float) -> None:
    reader, writer = await asyncio.open_unix_connection(address)
    writer.write(pack_message(0, os.getpid()))
    running: set[asyncio.Task[None]] = set()
    try:
        while True:
            number, row = await receive_message(reader)
            task = asyncio.ensure_future(_serve_call(number, row, timeout, writer))
            running.add(task)
            task.add_done_callback(running.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # the reward manager has closed the connection


async def _serve_call(number: int, row: Any, timeout: float, writer: asyncio.StreamWriter) -> None:
    try:
        outcome: Any = await asyncio.wait_for(call_loaded_function(row), timeout)
    except asyncio.TimeoutError:
        outcome = TaskTimeout(f"took longer than {timeout:g} s and was stopped")
    except MemoryError as error:
        outcome = error
    try:
        reply = pack_message(number, outcome)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is pickled
        reply = pack_message(number, invalid_result(f"the result of the reward function cannot be pickled: {error}"))
    writer.write(reply)


# -- responses with a known score -----------------------------------------------------------------------------------

# Numbers among which a correct answer is listed.
_DECOY_NUMBERS = range(1, 40)


@dataclass(frozen=True)
class GroundTruthCheck:
    """The score of a row's ground truth as a response, which should be 1."""

    score: float
    problem: str | None
    """Why the score is not 1; None: it is 1."""


def correct_response(data_source: str, ground_truth: Any) -> str | None:
    """Format the ground truth as a correct response; None if no function is known or it cannot be formatted.

    ValueError: the ground truth is invalid.
    """
    try:
        format_answer = score_function(data_source).answer
    except ValueError:
        return None
    return None if format_answer is None else format_answer(ground_truth)


def check_ground_truth(data_source: str, ground_truth: Any, extra_info: Any = None) -> GroundTruthCheck | None:
    """Score the ground truth of a row as a response; None if it cannot be formatted as one."""
    try:
        answer = correct_response(data_source, ground_truth)
    except (ValueError, TypeError) as error:
        return GroundTruthCheck(0.0, f"cannot be scored ({error})")
    if answer is None:
        return None
    row = {"data_source": data_source, "solution_str": answer, "ground_truth": ground_truth, "extra_info": extra_info}
    value, _, failure, _ = score_row(score_function(data_source).compute, row)
    if failure is not None:
        return GroundTruthCheck(0.0, f"cannot be scored ({failure.splitlines()[-1]})")
    return GroundTruthCheck(value, None if value == 1.0 else f"scores {value:g} against itself, not 1")


def responses_with_all_answers(data_source: str, ground_truth: Any, others: Sequence[Any] = ()) -> list[str]:
    """Return responses that list many answers, including the correct one: as plain text, and in the expected format if
    possible. A reward function should not give them the score of a correct response.

    The correct answer is neither first nor last. `others`: correct answers of other rows.
    """
    truth = str(ground_truth)
    candidates = [*map(str, _DECOY_NUMBERS), *map(str, others)]
    if len(truth) == 1 and truth.isalpha():
        candidates = list("ABCDEFGHIJ")
    decoys = [candidate for candidate in dict.fromkeys(candidates) if candidate != truth]
    middle = len(decoys) // 2
    text = ", ".join([*decoys[:middle], truth, *decoys[middle:]])
    try:
        formatted = correct_response(data_source, text) if isinstance(ground_truth, str) else None
    except (ValueError, TypeError):
        formatted = None
    return [text] if formatted is None else [text, formatted]
