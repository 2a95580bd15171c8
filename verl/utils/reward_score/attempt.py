"""Calls of a reward function, whatever it does short of ending its process: a value, extra fields, or an error."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.utils.concurrency import SharedEventLoop
from verl.utils.reward_score import registry

# What can go wrong; counted as reward/errors/<kind>.
RAISED, INVALID, MEMORY, TIMEOUT, DIED = ("raised", "invalid", "memory", "timeout", "died")
# value, extra fields, what is wrong, its kind
Fields = tuple[float, dict[str, Any], str | None, str | None]
Row = Mapping[str, Any]

_TRACE_LINES = 6
_loaded: Callable[[Any], Any]
_loop = SharedEventLoop("rewards")


def load(score: Callable[[Any], Any], users_own: dict[str, registry.ScoreFunction]) -> None:
    """In a scorer process: what `score_loaded` is to call, and the functions that users registered."""
    global _loaded
    _loaded = score
    registry.add_all(users_own)


def score_loaded(given: Any) -> Any:
    return _loaded(given)


def score_row(function: Callable[..., Any], row: Row) -> Fields:
    """One call for one row; what it raises is the row's error, but a lack of memory, which is the process's."""
    try:
        return normalised(_finished(registry.call_with_accepted(function, **row)))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - counted and shown by the reward manager
        return 0.0, {}, last_lines(traceback.format_exc()), RAISED


async def score_awaited(function: Callable[..., Any], row: Row) -> Fields:
    """`score_row` of an async function on a loop that it shares with others."""
    try:
        begun: Any = registry.call_with_accepted(function, **row)
        return normalised(await begun)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - counted and shown by the reward manager
        return 0.0, {}, last_lines(traceback.format_exc()), RAISED


def score_together(function: Callable[..., Any], rows: Sequence[Row]) -> list[Fields]:
    """Rows of an async function, all of them under way at once."""

    async def all_of_them() -> list[Fields]:
        return await asyncio.gather(*(score_awaited(function, row) for row in rows))

    return _loop.run(all_of_them())


def _finished(result: Any) -> Any:
    """What an async function returns, run to its end; anything else as it is."""
    return _loop.run(result) if inspect.iscoroutine(result) else result


def score_lists(function: Callable[..., Any], rows: Sequence[Row]) -> tuple[Fields, ...]:
    """One call for all rows: `function(data_sources, solution_strs, ground_truths, extra_infos)` returns a list.

    It may leave out parameters it does not need. A call that raises costs all of its rows.
    """
    named = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    lists = {f"{name}s": [row[name] for row in rows] for name in rows[0]}
    try:
        returned = _finished(function(**{name: values for name, values in lists.items() if takes_any or name in named}))
        if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
            raise TypeError(
                f"a list of {len(rows)} scores is expected; the function returned a {type(returned).__name__}"
            )
        if len(returned) != len(rows):
            raise ValueError(f"the function returned {len(returned)} scores for {len(rows)} answers")
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - counted and shown by the reward manager
        return ((0.0, {}, of_a_call(len(rows), last_lines(traceback.format_exc())), RAISED),) * len(rows)
    return tuple(map(normalised, returned))


def of_a_call(count: int, error: str) -> str:
    """The error of each of a call's rows."""
    return f"the call with its {count} answers failed: {error}"


def last_lines(trace: str) -> str:
    return "".join(trace.splitlines(keepends=True)[-_TRACE_LINES:]).strip()


def normalised(result: Any) -> Fields:
    """What a reward function returned, a finite number or a dict with one under `score`, in the form of a Score."""
    extra: dict[str, Any] = {}
    number = result
    if type(result) is not float and isinstance(result, Mapping):
        extra = {str(name): value for name, value in result.items()}
        if "score" not in extra:
            return invalid(f"the reward function returned a dict without 'score' (it has: {', '.join(extra)})")
        number = extra["score"]
    try:
        if isinstance(number, str | bytes):
            raise TypeError("a text is no number, whatever stands in it")
        value = float(number)
    except (TypeError, ValueError, OverflowError):
        return invalid(f"the reward function returned a {type(number).__name__}, not a number: {str(number)[:80]!r}")
    return (value, extra, None, None) if math.isfinite(value) else invalid(f"the reward function returned {value}")


def invalid(error: str) -> Fields:
    """No score, because of what was given or returned."""
    return 0.0, {}, error, INVALID
