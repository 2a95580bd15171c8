"""ToolSession: the tool calls of one trajectory, with their limits on time, concurrency, rate and response length.

A tool's per-trajectory state is created at its first call and always released at the end.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any
from uuid import uuid4

from verl.agent.tool_arguments import ArgumentCheck, CallFailed
from verl.tools.base_tool import BaseTool, ToolError
from verl.tools.schemas import ToolResponse
from verl.utils.concurrency import accepted_keywords, call_user_function, wait_with_timeout
from verl.utils.import_utils import describe_error
from verl.utils.tool_calls import ToolCall

__all__ = [
    "CallLimitError",
    "CallLimits",
    "CallThrottle",
    "LoadedTool",
    "RateLimiter",
    "ToolResult",
    "ToolSession",
    "truncate_text",
]

logger = logging.getLogger(__name__)

_TRUNCATED = "...(truncated)..."


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one tool call."""

    text: str
    """The tool response that the model reads, or the error message."""
    reward: float | None = None
    """Reward of the call, if the tool returned one."""
    metrics: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    """Kind of failure: unknown, malformed, arguments, exception, timeout or limit; None: success."""


@dataclass(frozen=True)
class CallLimits:
    """Limits of every call of every tool."""

    timeout_s: float
    """Maximum duration of a call, of each wait before its start (`CallThrottle`), of `calc_reward` and of `release`."""
    max_characters: int
    """Maximum length of a tool response, without the mark that `truncate_text` adds."""
    truncate_side: str
    """See `truncate_text`."""


class LoadedTool:
    """A tool with its argument check and throttle, shared by all trajectories of a loop worker."""

    def __init__(self, tool: BaseTool, throttle: CallThrottle) -> None:
        self.tool = tool
        self.name = tool.name
        self.check = ArgumentCheck(tool)
        self.throttle = throttle
        self.schema = tool.tool_schema.model_dump()
        # The base class returns 0, which would count as a reward.
        self.has_reward = type(tool).calc_reward is not BaseTool.calc_reward
        self._logged_types: set[type] = set()

    def log_error(self, method: str, error: BaseException) -> None:
        """Log the first error of each type, with its traceback: thousands of samples may raise the same one."""
        if type(error) not in self._logged_types:
            self._logged_types.add(type(error))
            logger.warning("Tool %s: %s failed: %r", self.name, method, error, exc_info=error)


class ToolSession:
    """Tool calls of one trajectory, as an async context manager."""

    def __init__(
        self,
        tools: Mapping[str, LoadedTool],
        kwargs: Mapping[str, Mapping[str, Any]],
        limits: CallLimits,
        release_tasks: set[asyncio.Task[None]],
    ) -> None:
        """`tools`: by name. `kwargs`: the row's `tools_kwargs`: by tool, the keywords of its methods (`create_kwargs`,
        …).

        `release_tasks`: a set of the caller, to which `close` adds its tasks; they are removed when they end.
        """
        self._tools = tools
        self._kwargs = kwargs
        self._limits = limits
        self._release_tasks = release_tasks
        self._creations: dict[str, asyncio.Task[str]] = {}
        """By tool that was called: the task that calls its `create` and returns the id of the instance."""
        self._proposed_ids: dict[str, str] = {}
        """By tool that was called: the id passed to `create`, which may return another one."""
        self.failures: Counter[str] = Counter()
        """Number of failed calls by `ToolResult.failure`, and of failed `calc_reward` and `release` calls."""
        self.statistics: dict[str, dict[str, float]] = {}
        """By tool: `calls`, `errors`, `seconds`."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools that this trajectory may call, for the chat template."""
        return [tool.schema for tool in self._tools.values()]

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(self, call: ToolCall, agent_data: Any = None) -> ToolResult:
        """Run one call. Does not raise: errors of the tool and invalid calls become a result with `failure`."""
        start = time.monotonic()
        try:
            result = await self._run(call, agent_data)
        except CallFailed as failed:
            result = ToolResult(failed.text, failure=failed.kind)
            self.failures[failed.kind] += 1
        if call.name in self._tools:
            counts = self.statistics.setdefault(call.name, {"calls": 0, "errors": 0, "seconds": 0.0})
            counts["calls"] += 1
            counts["errors"] += result.failure is not None
            counts["seconds"] += time.monotonic() - start
        limits = self._limits
        return replace(result, text=truncate_text(result.text, limits.max_characters, limits.truncate_side))

    async def calc_rewards(self) -> dict[str, float]:
        """Return the results of `calc_reward` by tool, for the tools that were called and override it."""
        rewards = {}
        for name, task in list(self._creations.items()):  # a copy: a call that is still running may add a tool
            loaded = self._tools[name]
            if not loaded.has_reward or not _has_succeeded(task):
                continue
            try:
                rewards[name] = float(await self._call_method(loaded, "calc_reward", task.result()))
            except Exception as error:  # noqa: BLE001 (counted)
                self._count_failure(loaded, "calc_reward", error)
        return rewards

    async def close(self) -> None:
        """Release all instances. If the caller is cancelled, the releases continue; `Toolbox.close` waits for them."""
        tasks = [asyncio.ensure_future(self._release(name)) for name in list(self._creations)]
        for task in tasks:
            self._release_tasks.add(task)
            task.add_done_callback(self._release_tasks.discard)
        await asyncio.shield(asyncio.gather(*tasks))

    async def _run(self, call: ToolCall, agent_data: Any) -> ToolResult:
        if call.error is not None:
            raise CallFailed(call.error, "malformed")
        loaded = self._tools.get(call.name)
        if loaded is None:
            raise CallFailed(f"Unknown function '{call.name}'. Available tools: {sorted(self._tools)}", "unknown")
        try:
            arguments = loaded.check.parse(call.arguments)
            async with loaded.throttle.slot(self._limits.timeout_s):
                response = await wait_with_timeout(self._limits.timeout_s, self._execute(loaded, arguments, agent_data))
            return _as_result(response)
        except CallFailed:
            raise
        except CallLimitError as error:
            raise _call_failed("limit", call.name, str(error)) from error
        except ToolError as error:
            raise _call_failed("exception", call.name, str(error)) from error
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            loaded.log_error("execute", error)
            raise _call_failed("timeout", call.name, str(error) or "it took too long") from error
        except Exception as error:
            loaded.log_error("execute", error)
            raise _call_failed("exception", call.name, describe_error(error)) from error

    async def _execute(self, loaded: LoadedTool, arguments: dict[str, Any], agent_data: Any) -> Any:
        instance = await self._instance(loaded)
        execute = loaded.tool.execute
        keywords = {"agent_data": agent_data, **self._method_kwargs(loaded, "execute_kwargs")}
        return await call_user_function(execute, instance, arguments, **accepted_keywords(execute, keywords))

    async def _instance(self, loaded: LoadedTool) -> str:
        """Return the id of the trajectory's instance of the tool; create the instance if there is none.

        Concurrent calls share one creation. A failed creation is repeated by the next call.
        """
        task = self._creations.get(loaded.name)
        if task is None or (task.done() and not _has_succeeded(task)):
            task = self._creations[loaded.name] = asyncio.ensure_future(self._create(loaded))
        # A call that times out does not cancel the creation: the next call and `close` use it.
        return await asyncio.shield(task)

    async def _create(self, loaded: LoadedTool) -> str:
        """Call the tool's `create`; return the id that it returns (`id` or `(id, response)`), or the proposed one."""
        kwargs = self._method_kwargs(loaded, "create_kwargs")
        proposed = self._proposed_ids[loaded.name] = uuid4().hex
        create = loaded.tool.create
        parameters = inspect.signature(create).parameters
        # `create` receives the row's keywords one by one, as the dict `create_kwargs`, or both.
        named = {name: value for name, value in kwargs.items() if name in parameters}
        keywords = {**named, "create_kwargs": kwargs, "instance_id": proposed}
        returned = await call_user_function(create, **accepted_keywords(create, keywords))
        returned_id = returned[0] if isinstance(returned, tuple) else returned
        return proposed if returned_id is None else returned_id

    async def _release(self, name: str) -> None:
        """Release the instance of a tool. A creation that does not end in time is cancelled, and its instance is also
        released, because it may already hold resources."""
        task = self._creations.pop(name)
        loaded = self._tools[name]
        if not task.done():
            await asyncio.wait({task}, timeout=self._limits.timeout_s)
        timed_out = task.cancel()  # False if the task has ended
        if not timed_out and not _has_succeeded(task):
            return
        try:
            await self._call_method(loaded, "release", self._proposed_ids[name] if timed_out else task.result())
        except Exception as error:  # noqa: BLE001 (counted)
            self._count_failure(loaded, "release", error)

    async def _call_method(self, loaded: LoadedTool, method: str, instance: str) -> Any:
        """Call `calc_reward` or `release` of a tool with the keywords of the row that it accepts."""
        function = getattr(loaded.tool, method)
        keywords = accepted_keywords(function, self._method_kwargs(loaded, f"{method}_kwargs"))
        return await wait_with_timeout(self._limits.timeout_s, call_user_function(function, instance, **keywords))

    def _method_kwargs(self, loaded: LoadedTool, kind: str) -> dict[str, Any]:
        """Return the row's keywords for a method of a tool. `kind`: create_kwargs, execute_kwargs, …"""
        return dict((self._kwargs.get(loaded.name) or {}).get(kind) or {})

    def _count_failure(self, loaded: LoadedTool, method: str, error: Exception) -> None:
        self.failures[method] += 1
        loaded.log_error(method, error)


def _as_result(response: Any) -> ToolResult:
    """Convert what a tool's `execute` returned: a response, or a tuple (response, reward[, metrics])."""
    reward, metrics = None, None
    if isinstance(response, tuple):
        if not 1 <= len(response) <= 3:
            raise ValueError(f"it returned a tuple of {len(response)}; expected (response, reward[, metrics])")
        response, reward, metrics = (*response, None, None)[:3]
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ValueError(f"its metrics are a {type(metrics).__name__}, not a dict")
    try:
        reward = None if reward is None else float(reward)
    except (TypeError, ValueError):
        raise ValueError(f"its reward {reward!r} is not a number") from None
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"its reward {reward!r} is not finite")
    return ToolResult(_response_text(response), reward, dict(metrics or {}))


def _response_text(response: Any) -> str:
    """Return the text of a tool's response; values of unknown types are converted to JSON."""
    if isinstance(response, ToolResponse):
        return response.text or ""
    if isinstance(response, str):
        return response
    if isinstance(response, Mapping) and response and set(response) <= {"text", "image", "video"}:
        return str(response.get("text") or "")
    if response is None:
        return ""
    return json.dumps(response, ensure_ascii=False, default=str)


def _call_failed(kind: str, name: str, cause: str) -> CallFailed:
    """Return the error of a call with the message that the model reads."""
    return CallFailed(f"Error executing tool '{name}': {cause}", kind)


def _has_succeeded(task: asyncio.Task[str]) -> bool:
    """Return whether a creation has ended without an error."""
    return task.done() and not task.cancelled() and task.exception() is None


class CallLimitError(Exception):
    """A call could not start in time because of `num_workers` or `rate_limit`."""


class RateLimiter:
    """At most `per_second` starts per second on average; after a pause, a burst of `per_second` starts (at least one).

    A token bucket: every start takes a token, and `per_second` tokens are added per second, up to the burst. A start
    may take a token in advance; it waits until that token is added.
    """

    def __init__(self, per_second: float) -> None:
        self.per_second = per_second
        self._seconds_to_fill = max(per_second, 1.0) / per_second
        self._full_at = 0.0
        """Time at which the bucket is full if there are no more starts."""

    def reserve(self, now: float) -> float:
        """Reserve the next start; return the seconds to wait for it."""
        self._full_at = max(self._full_at, now) + 1 / self.per_second
        return max(0.0, self._full_at - now - self._seconds_to_fill)

    def cancel(self) -> None:
        """Cancel the last reservation."""
        self._full_at -= 1 / self.per_second


class CallThrottle:
    """Limits the calls of a tool by all trajectories of a loop worker: at most `rate_limit` calls start per second, at
    most `num_workers` run at a time."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        """`limits`: the tool's `config`; a missing key means no limit."""
        rate, workers = limits.get("rate_limit"), limits.get("num_workers")
        for name, value in (("rate_limit", rate), ("num_workers", workers)):
            if value is not None and (not isinstance(value, (int, float)) or value <= 0):
                raise ValueError(f"{name}: {value!r} is not a number above 0.")
        self._rate = None if rate is None else RateLimiter(rate)
        self._slots = None if workers is None else asyncio.Semaphore(max(1, int(workers)))

    @asynccontextmanager
    async def slot(self, timeout_s: float) -> AsyncIterator[None]:
        """Wait until a call may start, and count it as running until the context ends. Raises CallLimitError if one of
        the limits would delay the call by more than `timeout_s`."""
        try:
            if self._slots is not None:
                await asyncio.wait_for(self._slots.acquire(), timeout_s)
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            raise CallLimitError(f"too many calls at once; none ended within {timeout_s:g} s") from error
        try:
            await self._wait_for_start(timeout_s)
            yield
        finally:
            if self._slots is not None:
                self._slots.release()

    async def _wait_for_start(self, timeout_s: float) -> None:
        if self._rate is None:
            return
        delay = self._rate.reserve(time.monotonic())
        if delay > timeout_s:
            self._rate.cancel()
            raise CallLimitError(
                f"more than {self._rate.per_second:g} calls per second; no start within {timeout_s:g} s"
            )
        if delay:
            await asyncio.sleep(delay)


def truncate_text(text: str, length: int, side: str) -> str:
    """Truncate a text to `length` characters, in addition to a mark where it was cut.

    `side`: the part to keep: left (beginning), right (end) or middle (both ends, without the middle).
    """
    if len(text) <= length:
        return text
    if side == "left":
        return text[:length] + _TRUNCATED.rstrip(".")
    if side == "right":
        return _TRUNCATED.lstrip(".") + text[-length:]
    tail = length // 2
    return text[: length - tail] + _TRUNCATED + text[len(text) - tail :]
