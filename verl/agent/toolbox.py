"""Toolbox: loads and checks the tools of a loop worker and creates a ToolSession for each trajectory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agent.tool_files import MULTI_TURN, TOOLS, ToolFiles, build_tools, read_tool_files
from verl.agent.tool_session import CallLimits, CallThrottle, LoadedTool, ToolResult, ToolSession
from verl.config.problems import Report
from verl.config.rollout import MultiTurnConfig
from verl.interactions.session import InteractionSet
from verl.tools.base_tool import BaseTool
from verl.tools.mcp_base_tool import McpServers
from verl.utils.concurrency import call_user_function, wait_with_timeout

logger = logging.getLogger(__name__)

__all__ = ["CallLimits", "ToolResult", "ToolSession", "Toolbox"]


class Toolbox:
    """Tools by name. Tools with the same `config` object share one throttle."""

    def __init__(
        self,
        tools: Sequence[BaseTool],
        limits: CallLimits,
        servers: McpServers | None = None,
        interactions: InteractionSet | None = None,
    ) -> None:
        throttles: dict[int, CallThrottle] = {}
        self._tools: dict[str, LoadedTool] = {}
        report = Report()
        for tool in tools:
            try:
                throttle = throttles.setdefault(id(tool.config), CallThrottle(tool.config or {}))
                self._tools[tool.name] = LoadedTool(tool, throttle)
                _warn_about_timeout(tool, limits.timeout_s)
            except ValueError as error:
                report.problem(TOOLS, tool.name, str(error).rstrip("."), "Correct it in the tool file")
        report.raise_if_any()
        self._limits = limits
        self._servers = servers or McpServers()
        self.interactions = interactions or InteractionSet({}, limits.timeout_s)
        """The simulated users."""
        self._releasing: set[asyncio.Task[None]] = set()
        self._unknown_names: set[str] = set()

    @classmethod
    def load(cls, config: MultiTurnConfig, files: ToolFiles | None = None) -> Toolbox:
        """Load the tools and simulated users of `config`; ConfigError lists all problems.

        `files`: the result of `read_tool_files`, if it was called before. Connects to the MCP servers to list their
        tools, and starts those with a command.
        """
        files = files or read_tool_files(config)
        servers = McpServers()
        limits = CallLimits(config.tool_timeout, config.max_tool_response_length, config.tool_response_truncate_side)
        try:
            interactions = InteractionSet.load(files.interactions, config.tool_timeout)
            return cls(build_tools(files, servers), limits, servers, interactions)
        except BaseException:
            servers.close()
            raise

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def schemas(self, selection: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """OpenAI schemas of the tools, for the chat template; with `selection` only of those, in its order."""
        return [tool.schema for tool in self._selected(selection, "selection").values()]

    async def check(self) -> None:
        """Call `check` of every tool; ConfigError lists the problems."""
        report = Report()
        tools = list(self._tools.values())
        problems = await asyncio.gather(*map(self._check_tool, tools))
        for tool, problem in zip(tools, problems, strict=True):
            if problem is not None:
                report.problem(TOOLS, tool.name, problem.rstrip(". "), "Start the service that the tool needs")
        report.raise_if_any()

    def session(self, row: Mapping[str, Any]) -> ToolSession:
        """The tools of one trajectory, by `extra_info.tool_selection` and `extra_info.tools_kwargs` of its row."""
        info = row.get("extra_info")
        info = info if isinstance(info, Mapping) else {}
        where = f"extra_info.tool_selection of row {info.get('index', '?')}"
        tools = self._selected(info.get("tool_selection"), where)
        kwargs = row.get("tools_kwargs") or info.get("tools_kwargs") or {}
        for name in kwargs.keys() - self._tools.keys() - self._unknown_names:
            # A Parquet column has a field for every tool that any row names; it is empty in the other rows.
            if kwargs[name]:
                self._unknown_names.add(name)
                logger.warning("extra_info.tools_kwargs.%s has no effect: there is no such tool.", name)
        return ToolSession(tools, kwargs, self._limits, self._releasing)

    async def close(self) -> None:
        """Wait for running releases of tool instances, and close the connections to MCP servers."""
        if self._releasing:
            await asyncio.wait(set(self._releasing), timeout=self._limits.timeout_s)
        await asyncio.to_thread(self._servers.close)

    def _selected(self, selection: Sequence[str] | None, where: str) -> dict[str, LoadedTool]:
        if selection is None:
            return self._tools
        unknown = [name for name in selection if name not in self._tools]
        if unknown:
            raise ValueError(f"{where}: unknown tool {', '.join(unknown)}. Known: {', '.join(self._tools)}.")
        return {name: self._tools[name] for name in selection}

    async def _check_tool(self, loaded: LoadedTool) -> str | None:
        check = getattr(loaded.tool, "check", None)
        if check is None:
            return None
        try:
            problem = await wait_with_timeout(self._limits.timeout_s, call_user_function(check))
        except Exception as error:  # noqa: BLE001 (reported)
            return f"{type(error).__name__}: {error}"
        return str(problem) if problem else None


def _warn_about_timeout(tool: BaseTool, timeout_s: float) -> None:
    own = tool.config["timeout"] if "timeout" in (tool.config or {}) else None
    if isinstance(own, (int, float)) and own > timeout_s:
        logger.warning(
            "Tool %s: its timeout is %g s, but its calls end after %g s. Raise %s.tool_timeout.",
            tool.name,
            own,
            timeout_s,
            MULTI_TURN,
        )
