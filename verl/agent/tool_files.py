"""Read the tool files of a run and build the tools.

The files are read by content where the run starts and sent to the loop workers, which build the tools.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.problems import Report
from verl.config.rollout import MultiTurnConfig
from verl.interactions.base import BaseInteraction
from verl.interactions.session import read_interactions
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import marked_functions
from verl.tools.mcp_base_tool import MCPBaseTool, McpServers
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.import_utils import ClassEntry, UserModule, error_text, read_class_list

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
