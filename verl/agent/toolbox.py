"""Toolbox: loads and checks the tools of a loop worker and creates a ToolSession for each trajectory.

The process that starts the run reads the tool files (`read_tool_files`) and sends their contents to the loop workers,
which build the tools.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.agent.tool_session import CallLimits, CallThrottle, LoadedTool, ToolResult, ToolSession
from verl.config.problems import Report
from verl.config.rollout import MultiTurnConfig
from verl.interactions.base import BaseInteraction, InteractionSet, read_interactions
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import marked_functions
from verl.tools.mcp_base_tool import MCPBaseTool, McpServers
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.concurrency import call_user_function, wait_with_timeout
from verl.utils.import_utils import ClassEntry, UserModule, error_text, read_class_list

__all__ = ["CallLimits", "ToolFiles", "ToolResult", "ToolSession", "Toolbox", "parse_tool_files", "read_tool_files"]

logger = logging.getLogger(__name__)

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOLS, FUNCTIONS = f"{MULTI_TURN}.tool_config_path", f"{MULTI_TURN}.function_tool_path"
_MCP_KEYS = ("mcp_servers_config_path", "tool_selected_list")


@dataclass(frozen=True)
class McpSource:
    """The servers of an MCP entry, and the names of its tools (None: all tools of the servers)."""

    servers: dict[str, dict[str, Any]] = field(repr=False)  # contains secrets
    selected: tuple[str, ...] | None


@dataclass(frozen=True)
class ToolEntry:
    """One entry of a tool file."""

    base: ClassEntry
    schema: OpenAIFunctionToolSchema | None
    mcp: McpSource | None

    def load(self, report: Report) -> type[Any] | None:
        """Import the class. On an error: None, and a problem is added to `report`."""
        return self.base.load(BaseTool if self.mcp is None else MCPBaseTool, report)


@dataclass(frozen=True)
class ToolFiles:
    """The contents of all files that define tools and simulated users of a run."""

    entries: tuple[ToolEntry, ...] = ()
    functions: UserModule | None = None
    interactions: tuple[ClassEntry, ...] = ()


def read_tool_files(config: MultiTurnConfig) -> ToolFiles:
    """Read the tool and interaction files, and the MCP server files and Python files that they name. Imports the Python
    files; ConfigError lists all problems."""
    report = Report()
    files = parse_tool_files(config, report)
    # Import errors are reported here, before worker processes are started.
    for entry in files.entries:
        entry.load(report)
    for interaction in files.interactions:
        interaction.load(BaseInteraction, report)
    if files.functions is not None:
        _build_functions(files.functions, report)
    report.raise_if_any()
    return files


def parse_tool_files(config: MultiTurnConfig, report: Report) -> ToolFiles:
    """Read the files that `read_tool_files` reads, without importing user code; problems are added to `report`."""
    functions = None
    if config.function_tool_path is not None:
        try:
            functions = UserModule.read(config.function_tool_path)
        except FileNotFoundError as error:
            report.problem(FUNCTIONS, config.function_tool_path, error_text(error), "Correct the path")
    entries = []
    if config.tool_config_path is not None:
        listed = read_class_list(TOOLS, config.tool_config_path, "tools", ("tool_schema", "mcp"), report)
        folder = Path(config.tool_config_path).parent
        entries = [ToolEntry(base, _read_schema(base, report), _read_mcp(base, folder, report)) for base in listed]
    path = config.interaction_config_path
    interactions = [] if path is None else read_interactions(path, report)
    return ToolFiles(tuple(entries), functions, tuple(interactions))


def build_tools(files: ToolFiles, servers: McpServers) -> list[BaseTool]:
    """Build the tools; ConfigError lists all problems."""
    report = Report()
    tools = [(tool, entry.base.location) for entry in files.entries for tool in _build_entry(entry, servers, report)]
    if files.functions is not None:
        tools += [(tool, FUNCTIONS) for tool in _build_functions(files.functions, report)]
    locations: dict[str, str] = {}
    for tool, location in tools:
        if tool.name in locations:
            report.problem(location, tool.name, f"{locations[tool.name]} has the same name", "Use unique names")
        locations.setdefault(tool.name, location)
    report.raise_if_any()
    return [tool for tool, _ in tools]


def _read_schema(base: ClassEntry, report: Report) -> OpenAIFunctionToolSchema | None:
    schema = base.options.get("tool_schema")
    try:
        return None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
    except ValueError as error:
        report.problem(
            f"{base.location}.tool_schema", schema, error_text(error), "Write it as an OpenAI function schema"
        )
        return None


def _read_mcp(base: ClassEntry, folder: Path, report: Report) -> McpSource | None:
    mcp = base.options.get("mcp")
    kind = base.config["type"] if "type" in base.config else "native" if mcp is None else "mcp"
    if kind == "native":
        return None
    if kind != "mcp":
        report.problem(f"{base.location}.config.type", kind, "unknown type", "Use native or mcp")
        return None
    path = mcp.get("mcp_servers_config_path") if isinstance(mcp, Mapping) else None
    key = f"{base.location}.mcp.mcp_servers_config_path"
    if not isinstance(mcp, Mapping) or not isinstance(path, str):
        report.problem(key, path, "it is missing", "Write mcp: {mcp_servers_config_path: servers.json}")
        return None
    for name in set(mcp) - set(_MCP_KEYS):
        report.problem(f"{base.location}.mcp.{name}", mcp[name], "unknown key", f"Known: {', '.join(_MCP_KEYS)}")
    selected = mcp.get("tool_selected_list")
    if selected is not None and not isinstance(selected, list):
        report.problem(f"{base.location}.mcp.tool_selected_list", selected, "is not a list", "Write [name, …]")
        return None
    servers = _read_servers(key, path, folder, report)
    return None if servers is None else McpSource(servers, None if selected is None else tuple(selected))


def _read_servers(key: str, path: str, folder: Path, report: Report) -> dict[str, dict[str, Any]] | None:
    """Servers by name, with environment variables (`$TOKEN`) expanded. `path` is relative to the working directory or
    to `folder`. Errors do not contain values: they may be secrets."""
    file = Path(os.path.expandvars(path)).expanduser()
    file = file if file.exists() else folder / file
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        cause = str(error.strerror) if isinstance(error, OSError) else f"is not JSON ({error_text(error)})"
        report.problem(key, path, cause, f"Searched in the working directory and in {folder.absolute()}")
        return None
    servers = content.get("mcpServers") if isinstance(content, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        report.problem(key, path, "it lists no servers", 'Write {"mcpServers": {"name": {"url": …}}}')
        return None
    invalid = [
        name
        for name, server in servers.items()
        if not isinstance(server, Mapping) or len(server.keys() & {"url", "command"}) != 1
    ]
    for name in invalid:
        report.problem(f"{path}: mcpServers.{name}", "…", "it needs either url or command", "Set one of them")
    return None if invalid else {str(name): _expand_variables(server) for name, server in servers.items()}


def _expand_variables(value: Any) -> Any:
    if isinstance(value, str):
        return os.path.expandvars(value)
    if isinstance(value, Mapping):
        return {name: _expand_variables(item) for name, item in value.items()}
    return [_expand_variables(item) for item in value] if isinstance(value, list) else value


def _build_entry(entry: ToolEntry, servers: McpServers, report: Report) -> list[BaseTool]:
    tool_class = entry.load(report)
    if tool_class is None:
        return []
    try:
        if entry.mcp is None:
            return [tool_class(entry.base.config, entry.schema)]
        return _build_mcp(tool_class, entry.base, entry.mcp, servers, report)
    except Exception as error:  # noqa: BLE001 (a user's constructor; reported)
        key, cause = f"{entry.base.location}.class_name", f"{type(error).__name__}: {error_text(error)}"
        report.problem(key, str(entry.base.path), f"its constructor raised {cause}", "Correct its config or its code")
        return []


def _build_mcp(
    tool_class: type[MCPBaseTool], base: ClassEntry, mcp: McpSource, servers: McpServers, report: Report
) -> list[BaseTool]:
    """One tool of `tool_class` per selected tool of the servers; they share the entry's rate and concurrency limits."""
    tools: list[BaseTool] = []
    available: list[str] = []
    for name, spec in mcp.servers.items():
        server = servers.get(name, spec)
        try:
            schemas = server.list_tools()
        except Exception as error:  # noqa: BLE001 (of a server; reported)
            cause = f"listing its tools failed: {error_text(error)}"
            remedy = "Start the server, or correct the MCP servers file"
            report.problem(f"{base.location}.mcp ({name})", server.address, cause, remedy)
            continue
        available += [schema.function.name for schema in schemas]
        for schema in schemas:
            if mcp.selected is None or schema.function.name in mcp.selected:
                tool = tool_class(base.config, schema)
                tool.server = server
                tools.append(tool)
    missing = sorted(set(mcp.selected or ()) - set(available))
    if missing and available:
        key, remedy = f"{base.location}.mcp.tool_selected_list", f"Available: {', '.join(sorted(available))}"
        report.problem(key, ", ".join(missing), "no server has such a tool", remedy)
    return tools


def _build_functions(module: UserModule, report: Report) -> list[BaseTool]:
    try:
        tools = marked_functions(module.load())
    except (RuntimeError, ValueError) as error:
        report.problem(FUNCTIONS, module.path, error_text(error), "Correct the file")
        return []
    if not tools:
        report.problem(FUNCTIONS, module.path, "it has no tools", "Decorate functions with @function_tool")
    return list(tools)


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
        self._release_tasks: set[asyncio.Task[None]] = set()
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
        """The tool session of a row's trajectory. Reads `extra_info.tool_selection` and `extra_info.tools_kwargs`."""
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
        return ToolSession(tools, kwargs, self._limits, self._release_tasks)

    async def close(self) -> None:
        """Wait for running releases of tool instances, and close the connections to MCP servers."""
        if self._release_tasks:
            await asyncio.wait(set(self._release_tasks), timeout=self._limits.timeout_s)
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
