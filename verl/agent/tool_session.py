"""ToolSession: the tools of one trajectory. Their state is made at the first call and released whatever happens."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any
from uuid import uuid4

from verl.agent.tool_arguments import ArgumentCheck, CallFailed
from verl.agent.tool_limits import Gate, LimitError, truncated
from verl.tools.base_tool import BaseTool, ToolError
from verl.tools.schemas import ToolResponse
from verl.utils.concurrency import accepted_keywords, call_user_function, wait_with_timeout
from verl.utils.tool_calls import ToolCall

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one call. `failure`: unknown, malformed, arguments, exception, timeout, limit; None: it worked."""

    text: str
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class CallLimits:
    """What every call of every tool is bound to."""

    seconds: float
    characters: int
    side: str
    """Which part of a longer answer the model sees, see `truncated`."""


class LoadedTool:
    """A tool with what a loop worker keeps beside it."""

    def __init__(self, tool: BaseTool, gate: Gate) -> None:
        self.tool = tool
        self.name = tool.name
        self.check = ArgumentCheck(tool)
        self.gate = gate
        self.schema = tool.tool_schema.model_dump()
        # Asked only of tools that define it: a reward of 0 is a reward too.
        self.has_reward = type(tool).calc_reward is not BaseTool.calc_reward
        self._logged: set[type] = set()

    def log(self, what: str, error: BaseException) -> None:
        """Of each kind of error the first with its traceback; thousands of samples may meet the same one."""
        first = type(error) not in self._logged
        self._logged.add(type(error))
        if first:
            logger.warning("Tool %s: %s failed: %r", self.name, what, error, exc_info=error)


class ToolSession:
    """Calls of one trajectory, as an async context manager. `failures` counts what failed, by kind."""

    def __init__(
        self,
        tools: Mapping[str, LoadedTool],
        kwargs: Mapping[str, Mapping[str, Any]],
        limits: CallLimits,
        releasing: set[asyncio.Task[None]],
    ) -> None:
        self._tools = tools
        self._kwargs = kwargs
        self._limits = limits
        self._releasing = releasing
        self._instances: dict[str, asyncio.Task[str]] = {}
        self._ids: dict[str, str] = {}
        self.failures: Counter[str] = Counter()
        self.statistics: dict[str, dict[str, float]] = {}
        """Of each tool that was called: calls, errors, seconds."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools that this trajectory may call, for the chat template."""
        return [tool.schema for tool in self._tools.values()]

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(self, call: ToolCall, agent_data: Any = None) -> ToolResult:
        """Run one call. A tool's fault, or the model's, is an answer with `failure`; it raises nothing."""
        begun = time.monotonic()
        try:
            result = await self._run(call, agent_data)
        except CallFailed as failed:
            result = ToolResult(failed.text, failure=failed.kind)
            self.failures[failed.kind] += 1
        if call.name in self._tools:
            counts = self.statistics.setdefault(call.name, {"calls": 0, "errors": 0, "seconds": 0.0})
            counts["calls"] += 1
            counts["errors"] += result.failure is not None
            counts["seconds"] += time.monotonic() - begun
        return replace(result, text=truncated(result.text, self._limits.characters, self._limits.side))

    async def finish(self) -> dict[str, float]:
        """What each tool that was used and has a `calc_reward` says the trajectory earned."""
        rewards = {}
        for name, task in self._instances.items():
            loaded = self._tools[name]
            if not loaded.has_reward or not _created(task):
                continue
            try:
                reward = await self._ask(loaded, "calc_reward", task.result())
                rewards[name] = float(reward)
            except Exception as error:  # noqa: BLE001 (counted)
                self._count(loaded, "calc_reward", error)
        return rewards

    async def close(self) -> None:
        """Release every instance. A trajectory that is cancelled meanwhile leaves the rest of it to the toolbox."""
        tasks = [asyncio.ensure_future(self._release(name)) for name in list(self._instances)]
        for task in tasks:
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)
        await asyncio.shield(asyncio.gather(*tasks))

    async def _run(self, call: ToolCall, agent_data: Any) -> ToolResult:
        if call.error is not None:
            raise CallFailed(call.error, "malformed")
        loaded = self._tools.get(call.name)
        if loaded is None:
            raise CallFailed(f"Unknown function '{call.name}'. Available tools: {sorted(self._tools)}", "unknown")
        try:
            arguments = loaded.check.read(call.arguments)
            async with loaded.gate.place(self._limits.seconds):
                answer = await wait_with_timeout(self._limits.seconds, self._execute(loaded, arguments, agent_data))
            return result_of(answer)
        except CallFailed:
            raise
        except LimitError as error:
            raise _failed("limit", call.name, str(error)) from error
        except ToolError as error:
            raise _failed("exception", call.name, str(error)) from error
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            loaded.log("execute", error)
            raise _failed("timeout", call.name, str(error) or "it took too long") from error
        except Exception as error:
            loaded.log("execute", error)
            raise _failed("exception", call.name, f"{type(error).__name__}: {error}") from error

    async def _execute(self, loaded: LoadedTool, arguments: dict[str, Any], agent_data: Any) -> Any:
        instance = await self._instance(loaded)
        tool = loaded.tool
        given = {"agent_data": agent_data, **self._row_kwargs(loaded, "execute_kwargs")}
        return await call_user_function(tool.execute, instance, arguments, **accepted_keywords(tool.execute, given))

    async def _instance(self, loaded: LoadedTool) -> str:
        """The trajectory's instance of the tool. One creation for calls side by side; a failed one is tried again."""
        task = self._instances.get(loaded.name)
        if task is None or (task.done() and not _created(task)):
            task = self._instances[loaded.name] = asyncio.ensure_future(self._create(loaded))
        # A call that is given up leaves the creation to the next one, and to `close`.
        return await asyncio.shield(task)

    async def _create(self, loaded: LoadedTool) -> str:
        kwargs = self._row_kwargs(loaded, "create_kwargs")
        instance = self._ids[loaded.name] = uuid4().hex
        create = loaded.tool.create
        given = {**_named(create, kwargs), "create_kwargs": kwargs, "instance_id": instance}
        made = await call_user_function(create, **accepted_keywords(create, given))
        made = made[0] if isinstance(made, tuple) else made
        return instance if made is None else made

    async def _release(self, name: str) -> None:
        task = self._instances.pop(name)
        loaded = self._tools[name]
        if not task.done():
            await asyncio.wait({task}, timeout=self._limits.seconds)
        given_up = task.cancel()
        if not given_up and not _created(task):
            return
        try:
            await self._ask(loaded, "release", self._ids[name] if given_up else task.result())
        except Exception as error:  # noqa: BLE001 (counted)
            self._count(loaded, "release", error)

    async def _ask(self, loaded: LoadedTool, method: str, instance: str) -> Any:
        function = getattr(loaded.tool, method)
        given = accepted_keywords(function, self._row_kwargs(loaded, f"{method}_kwargs"))
        return await wait_with_timeout(self._limits.seconds, call_user_function(function, instance, **given))

    def _row_kwargs(self, loaded: LoadedTool, kind: str) -> dict[str, Any]:
        return dict((self._kwargs.get(loaded.name) or {}).get(kind) or {})

    def _count(self, loaded: LoadedTool, what: str, error: Exception) -> None:
        self.failures[what] += 1
        loaded.log(what, error)


def result_of(answer: Any) -> ToolResult:
    """The result in whatever shape the tool has returned it; a ValueError says which there are."""
    reward, metrics = None, None
    if isinstance(answer, tuple):
        if not 1 <= len(answer) <= 3:
            raise ValueError(f"it returned a tuple of {len(answer)}; expected (response, reward[, metrics])")
        answer, reward, metrics = (*answer, None, None)[:3]
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ValueError(f"its metrics are a {type(metrics).__name__}, not a dict")
    try:
        reward = None if reward is None else float(reward)
    except (TypeError, ValueError):
        raise ValueError(f"its reward {reward!r} is not a number") from None
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"its reward {reward!r} is not finite")
    return ToolResult(_text_of(answer), reward, dict(metrics or {}))


def _text_of(answer: Any) -> str:
    if isinstance(answer, ToolResponse):
        return answer.text or ""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, Mapping) and answer and set(answer) <= {"text", "image", "video"}:
        return str(answer.get("text") or "")
    if answer is None:
        return ""
    return json.dumps(answer, ensure_ascii=False, default=str)


def _failed(kind: str, name: str, why: str) -> CallFailed:
    return CallFailed(f"Error executing tool '{name}': {why}", kind)


def _created(task: asyncio.Task[str]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _named(function: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `keywords` that the function names as parameters."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in keywords.items() if name in names}
