"""Toolbox: the tools of a loop worker. It loads and checks them and opens a session for each trajectory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agent.tool_files import MULTI_TURN, TOOLS, ToolFiles, build_tools, read_tool_files
from verl.agent.tool_limits import Gate
from verl.agent.tool_session import CallLimits, LoadedTool, ToolResult, ToolSession
from verl.config.problems import Report
from verl.config.rollout import MultiTurnConfig
from verl.interactions.box import InteractionBox
from verl.tools.base_tool import BaseTool
from verl.tools.mcp_servers import McpServers
from verl.utils.concurrency import call_user_function, wait_with_timeout

logger = logging.getLogger(__name__)

__all__ = ["CallLimits", "ToolResult", "ToolSession", "Toolbox"]


class Toolbox:
    """Tools by name. Those that share one `config` object share its limits."""

    def __init__(
        self,
        tools: Sequence[BaseTool],
        limits: CallLimits,
        servers: McpServers | None = None,
        interactions: InteractionBox | None = None,
    ) -> None:
        gates: dict[int, Gate] = {}
        self._tools: dict[str, LoadedTool] = {}
        report = Report()
        for tool in tools:
            try:
                gate = gates.setdefault(id(tool.config), Gate(tool.config or {}))
                self._tools[tool.name] = LoadedTool(tool, gate)
                _warn_of_timeout(tool, limits.seconds)
            except ValueError as error:
                report.problem(TOOLS, tool.name, str(error).rstrip("."), "Correct it in the tool file")
        report.raise_if_any()
        self._limits = limits
        self._servers = servers or McpServers()
        self.interactions = interactions or InteractionBox({}, limits.seconds)
        """The simulated users."""
        self._releasing: set[asyncio.Task[None]] = set()
        self._unknown: set[str] = set()

    @classmethod
    def load(cls, config: MultiTurnConfig, files: ToolFiles | None = None) -> Toolbox:
        """The tools and users that the keys of `multi_turn` name, of `files` where they were read before; ConfigError
        tells all problems at once. It starts or calls the MCP servers, to learn their tools.
        """
        files = files or read_tool_files(config)
        servers = McpServers()
        limits = CallLimits(config.tool_timeout, config.max_tool_response_length, config.tool_response_truncate_side)
        try:
            users = InteractionBox.load(files.interactions, config.tool_timeout)
            return cls(build_tools(files, servers), limits, servers, users)
        except BaseException:
            servers.close()
            raise

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def schemas(self, selection: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The tools as OpenAI dicts, for the chat template; with `selection` only those, in its order."""
        return [tool.schema for tool in self._selected(selection, "selection").values()]

    async def check(self) -> None:
        """Ask every tool whether it can work; ConfigError tells of all that cannot."""
        report = Report()
        tools = list(self._tools.values())
        for tool, problem in zip(tools, await asyncio.gather(*map(self._problem_of, tools)), strict=True):
            if problem is not None:
                report.problem(TOOLS, tool.name, problem.rstrip(". "), "See that what the tool needs is running")
        report.raise_if_any()

    def session(self, row: Mapping[str, Any]) -> ToolSession:
        """The tools for one trajectory: `extra_info.tool_selection` and `extra_info.tools_kwargs` of its row hold."""
        info = row.get("extra_info")
        info = info if isinstance(info, Mapping) else {}
        where = f"extra_info.tool_selection of row {info.get('index', '?')}"
        tools = self._selected(info.get("tool_selection"), where)
        kwargs = row.get("tools_kwargs") or info.get("tools_kwargs") or {}
        for name in kwargs.keys() - self._tools.keys() - self._unknown:
            # A table of rows has a field for every tool that any of them names.
            if kwargs[name]:
                self._unknown.add(name)
                logger.warning("extra_info.tools_kwargs.%s has no effect: there is no tool of this name.", name)
        return ToolSession(tools, kwargs, self._limits, self._releasing)

    async def close(self) -> None:
        """Wait for what trajectories left to release, and end the connections to MCP servers."""
        if self._releasing:
            await asyncio.wait(set(self._releasing), timeout=self._limits.seconds)
        await asyncio.to_thread(self._servers.close)

    def _selected(self, selection: Sequence[str] | None, where: str) -> dict[str, LoadedTool]:
        if selection is None:
            return self._tools
        unknown = [name for name in selection if name not in self._tools]
        if unknown:
            raise ValueError(f"{where}: there is no tool {', '.join(unknown)}. There are: {', '.join(self._tools)}.")
        return {name: self._tools[name] for name in selection}

    async def _problem_of(self, loaded: LoadedTool) -> str | None:
        check = getattr(loaded.tool, "check", None)
        if check is None:
            return None
        try:
            problem = await wait_with_timeout(self._limits.seconds, call_user_function(check))
        except Exception as error:  # noqa: BLE001 (reported)
            return f"{type(error).__name__}: {error}"
        return str(problem) if problem else None


def _warn_of_timeout(tool: BaseTool, seconds: float) -> None:
    own = tool.config["timeout"] if "timeout" in (tool.config or {}) else None
    if isinstance(own, (int, float)) and own > seconds:
        key = f"{MULTI_TURN}.tool_timeout"
        logger.warning(
            "Tool %s: its timeout is %g s, but %s = %g ends its calls. Set it higher.", tool.name, own, key, seconds
        )
