"""Calls of a reward function in a scorer process: one row, rows of an async function, or a list of rows.

A call returns a value, extra fields, or an error, unless it ends its process. Checks of a reward function score
responses whose score is known: correct ones, empty ones, and ones that list many answers.
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

# Before each message: the number of the call, and the size of its content. The first message has the process id.
HEADER = struct.Struct("<QI")
_TRACE_LINES = 6
_loaded: Callable[[Any], Any]
_loop = SharedEventLoop("rewards")


def load(score: Callable[[Any], Any], user_functions: dict[str, registry.ScoreFunction]) -> None:
    """In a scorer process: set the function that `score_loaded` calls, and register the functions of users."""
    global _loaded
    _loaded = score
    registry.register_all(user_functions)


def score_loaded(row: Any) -> Any:
    return _loaded(row)


def score_row(function: Callable[..., Any], row: RewardArguments) -> ScoreFields:
    """Call the function for one row. Exceptions become the row's error, except MemoryError, which ends the process."""
    try:
        return parse_result(_run_if_coroutine(registry.call_with_accepted(function, **row)))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - counted and shown by the reward manager
        return 0.0, {}, last_lines(traceback.format_exc()), RAISED


async def score_awaited(function: Callable[..., Any], row: RewardArguments) -> ScoreFields:
    """`score_row` of an async function, in an event loop."""
    try:
        call: Any = registry.call_with_accepted(function, **row)
        return parse_result(await call)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - counted and shown by the reward manager
        return 0.0, {}, last_lines(traceback.format_exc()), RAISED


def score_together(function: Callable[..., Any], rows: Sequence[RewardArguments]) -> list[ScoreFields]:
    """Call an async function for all rows concurrently."""

    async def score_all() -> list[ScoreFields]:
        return await asyncio.gather(*(score_awaited(function, row) for row in rows))

    return _loop.run(score_all())


def _run_if_coroutine(result: Any) -> Any:
    """Return the result of a coroutine; any other value unchanged."""
    return _loop.run(result) if inspect.iscoroutine(result) else result


def score_lists(function: Callable[..., Any], rows: Sequence[RewardArguments]) -> tuple[ScoreFields, ...]:
    """One call for all rows: `function(data_sources, solution_strs, ground_truths, extra_infos)` returns a list.

    It may omit parameters. If the call raises, all its rows have the error.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    lists = {f"{name}s": [row[name] for row in rows] for name in rows[0]}
    try:
        returned = _run_if_coroutine(
            function(**{name: values for name, values in lists.items() if takes_any or name in parameters})
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
    return "".join(trace.splitlines(keepends=True)[-_TRACE_LINES:]).strip()


def parse_result(result: Any) -> ScoreFields:
    """Convert the result of a reward function: a finite number, or a dict with one under `score`."""
    extra: dict[str, Any] = {}
    number = result
    if type(result) is not float and isinstance(result, Mapping):
        extra = {str(name): value for name, value in result.items()}
        if "score" not in extra:
            return invalid(f"the reward function returned a dict without 'score' (it has: {', '.join(extra)})")
        number = extra["score"]
    try:
        if isinstance(number, str | bytes):
            raise TypeError("a text is not a number")
        value = float(number)
    except (TypeError, ValueError, OverflowError):
        return invalid(f"the reward function returned a {type(number).__name__}, not a number: {str(number)[:80]!r}")
    return (value, extra, None, None) if math.isfinite(value) else invalid(f"the reward function returned {value}")


def invalid(error: str) -> ScoreFields:
    """The fields of a row without a valid score."""
    return 0.0, {}, error, INVALID


# -- an event loop in a scorer process that starts every call that arrives on a socket, and replies as they end -----


def serve_calls(address: str, timeout: float) -> None:
    """Run the loaded function for each row that arrives at the socket `address`, until it is closed."""
    asyncio.run(_serve_calls(address, timeout))


def message(number: int, content: Any) -> bytes:
    """Pack a message; raises what pickling raises."""
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(number, len(data)) + data


async def receive(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """The number and content of the next message. IncompleteReadError: the connection is closed."""
    number, size = HEADER.unpack(await reader.readexactly(HEADER.size))
    return number, pickle.loads(await reader.readexactly(size))


async def _serve_calls(address: str, timeout: float) -> None:
    reader, writer = await asyncio.open_unix_connection(address)
    writer.write(message(0, os.getpid()))
    running: set[asyncio.Task[None]] = set()
    try:
        while True:
            number, row = await receive(reader)
            task = asyncio.ensure_future(_serve_call(number, row, timeout, writer))
            running.add(task)
            task.add_done_callback(running.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # the reward manager has closed the connection


async def _serve_call(number: int, row: Any, timeout: float, writer: asyncio.StreamWriter) -> None:
    try:
        outcome: Any = await asyncio.wait_for(score_loaded(row), timeout)
    except asyncio.TimeoutError:
        outcome = TaskTimeout(f"took longer than {timeout:g} s and was stopped")
    except MemoryError as error:
        outcome = error
    try:
        reply = message(number, outcome)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is pickled
        reply = message(number, invalid(f"the result of the reward function cannot be pickled: {error}"))
    writer.write(reply)


# -- responses with a known score -----------------------------------------------------------------------------------

EMPTY = ""
_DECOYS = 40


@dataclass(frozen=True)
class Trial:
    """The score of a row's ground truth as a response."""

    score: float
    problem: str | None  # None: it scores 1, as it must


def correct_response(data_source: str, ground_truth: Any) -> str | None:
    """Format the ground truth as a correct response; None if no function is known or it cannot be formatted.

    ValueError: the ground truth is invalid.
    """
    try:
        format_answer = score_function(data_source).answer
    except ValueError:
        return None
    return None if format_answer is None else format_answer(ground_truth)


def try_ground_truth(data_source: str, ground_truth: Any, extra_info: Any = None) -> Trial | None:
    """Score the ground truth of a row as a response; None if it cannot be formatted as one."""
    try:
        answer = correct_response(data_source, ground_truth)
    except (ValueError, TypeError) as error:
        return Trial(0.0, f"cannot be scored ({error})")
    if answer is None:
        return None
    row = {"data_source": data_source, "solution_str": answer, "ground_truth": ground_truth, "extra_info": extra_info}
    value, _, failure, _ = score_row(score_function(data_source).compute, row)
    if failure is not None:
        return Trial(0.0, f"cannot be scored ({failure.splitlines()[-1]})")
    return Trial(value, None if value == 1.0 else f"scores {value:g} against itself, not 1")


def responses_with_all_answers(data_source: str, ground_truth: Any, others: Sequence[Any] = ()) -> list[str]:
    """Responses that list many answers, including the correct one: plain, and in the expected format if possible.

    The correct one is neither first nor last. `others`: correct answers of other rows.
    """
    truth = str(ground_truth)
    candidates = [*map(str, range(1, _DECOYS)), *map(str, others)]
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
