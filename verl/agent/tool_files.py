"""The files that describe tools: read whole where the run starts, so that they travel; made into tools elsewhere."""

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
from verl.interactions.box import read_interactions
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import marked_functions
from verl.tools.mcp_base_tool import MCPBaseTool
from verl.tools.mcp_servers import McpServers
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.import_utils import ClassEntry, UserModule, error_text, read_class_list

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOLS, FUNCTIONS = f"{MULTI_TURN}.tool_config_path", f"{MULTI_TURN}.function_tool_path"
_MCP_KEYS = ("mcp_servers_config_path", "tool_selected_list")


@dataclass(frozen=True)
class McpPart:
    """The servers of an MCP entry and which of their tools it takes; None: all."""

    servers: dict[str, dict[str, Any]] = field(repr=False)  # holds secrets
    selected: tuple[str, ...] | None


@dataclass(frozen=True)
class ToolEntry:
    """One entry of a tool file."""

    base: ClassEntry
    schema: OpenAIFunctionToolSchema | None
    mcp: McpPart | None

    def load(self, report: Report) -> type[Any] | None:
        """The class, or None and a problem in the report."""
        return self.base.load(BaseTool if self.mcp is None else MCPBaseTool, report)


@dataclass(frozen=True)
class ToolFiles:
    """Everything that the tools of a run are made of, by content."""

    entries: tuple[ToolEntry, ...] = ()
    functions: UserModule | None = None
    interactions: tuple[ClassEntry, ...] = ()


def read_tool_files(config: MultiTurnConfig) -> ToolFiles:
    """Read the files of tools and simulated users, the servers files they name and users' Python files; ConfigError
    tells all problems."""
    report = Report()
    files = parse_tool_files(config, report)
    # Import errors are reported here, before worker processes are started.
    for entry in files.entries:
        entry.load(report)
    for user in files.interactions:
        user.load(BaseInteraction, report)
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
        beside = Path(config.tool_config_path).parent
        entries = [ToolEntry(base, _read_schema(base, report), _read_mcp(base, beside, report)) for base in listed]
    users = [] if config.interaction_config_path is None else read_interactions(config.interaction_config_path, report)
    return ToolFiles(tuple(entries), functions, tuple(users))


def build_tools(files: ToolFiles, servers: McpServers) -> list[BaseTool]:
    """The tools; ConfigError tells everything that keeps one of them from being made."""
    report = Report()
    made = [(tool, entry.base.location) for entry in files.entries for tool in _build_entry(entry, servers, report)]
    if files.functions is not None:
        made += [(tool, FUNCTIONS) for tool in _build_functions(files.functions, report)]
    first: dict[str, str] = {}
    for tool, place in made:
        if tool.name in first:
            why = f"there is a tool of this name already ({first[tool.name]})"
            report.problem(place, tool.name, why, "Give each tool a name of its own")
        first.setdefault(tool.name, place)
    report.raise_if_any()
    return [tool for tool, _ in made]


def _read_schema(base: ClassEntry, report: Report) -> OpenAIFunctionToolSchema | None:
    schema = base.options.get("tool_schema")
    try:
        return None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
    except ValueError as error:
        report.problem(
            f"{base.location}.tool_schema", schema, error_text(error), "Write it as an OpenAI function schema"
        )
        return None


def _read_mcp(base: ClassEntry, beside: Path, report: Report) -> McpPart | None:
    part = base.options.get("mcp")
    kind = base.config["type"] if "type" in base.config else "native" if part is None else "mcp"
    if kind == "native":
        return None
    if kind != "mcp":
        report.problem(f"{base.location}.config.type", kind, "there is no such type", "Write native or mcp")
        return None
    path = part.get("mcp_servers_config_path") if isinstance(part, Mapping) else None
    key = f"{base.location}.mcp.mcp_servers_config_path"
    if not isinstance(part, Mapping) or not isinstance(path, str):
        report.problem(key, path, "it is missing", "Write mcp: {mcp_servers_config_path: servers.json}")
        return None
    for name in set(part) - set(_MCP_KEYS):
        report.problem(f"{base.location}.mcp.{name}", part[name], "unknown key", f"Known: {', '.join(_MCP_KEYS)}")
    selected = part.get("tool_selected_list")
    servers = _read_servers(key, path, beside, report)
    return None if servers is None else McpPart(servers, None if selected is None else tuple(selected))


def _read_servers(key: str, path: str, beside: Path, report: Report) -> dict[str, dict[str, Any]] | None:
    """Servers by name, environment variables (`$TOKEN`) filled in. Values are never shown: they may be secrets."""
    wanted = Path(os.path.expandvars(path)).expanduser()
    file = wanted if wanted.exists() else beside / wanted
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = str(error.strerror) if isinstance(error, OSError) else f"is not JSON ({error_text(error)})"
        report.problem(key, path, why, f"It is looked for here and in {beside.absolute()}")
        return None
    servers = content.get("mcpServers") if isinstance(content, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        report.problem(key, path, "it names no servers", 'Write {"mcpServers": {"name": {"url": …}}}')
        return None
    wrong = [
        name for name, server in servers.items() if not isinstance(server, Mapping) or len(server.keys() & _WAYS) != 1
    ]
    for name in wrong:
        report.problem(f"{path}: mcpServers.{name}", "…", "it needs either url or command", "Write one of them")
    return None if wrong else {str(name): _expanded(server) for name, server in servers.items()}


_WAYS = {"url", "command"}


def _expanded(value: Any) -> Any:
    if isinstance(value, str):
        return os.path.expandvars(value)
    if isinstance(value, Mapping):
        return {name: _expanded(item) for name, item in value.items()}
    return [_expanded(item) for item in value] if isinstance(value, list) else value


def _build_entry(entry: ToolEntry, servers: McpServers, report: Report) -> list[BaseTool]:
    found = entry.load(report)
    if found is None:
        return []
    try:
        if entry.mcp is None:
            return [found(entry.base.config, entry.schema)]
        return _build_mcp(found, entry.base, entry.mcp, servers, report)
    except Exception as error:  # noqa: BLE001 (a user's constructor; reported)
        why = f"it cannot be made: {type(error).__name__}: {error_text(error)}"
        report.problem(f"{entry.base.location}.class_name", str(entry.base.path), why, "Correct its config or its code")
        return []


def _build_mcp(
    found: type[MCPBaseTool], base: ClassEntry, mcp: McpPart, servers: McpServers, report: Report
) -> list[BaseTool]:
    """A tool of the class for every tool of the servers that is selected; they share the entry's limits."""
    tools: list[BaseTool] = []
    listed: list[str] = []
    for name, spec in mcp.servers.items():
        server = servers.get(name, spec)
        try:
            schemas = server.list_tools()
        except Exception as error:  # noqa: BLE001 (a server's; reported)
            fix = "Start it, or correct the servers file"
            report.problem(
                f"{base.location}.mcp ({name})", server.address, f"it does not answer: {error_text(error)}", fix
            )
            continue
        listed += [schema.function.name for schema in schemas]
        for schema in schemas:
            if mcp.selected is None or schema.function.name in mcp.selected:
                tool = found(base.config, schema)
                tool.server = server
                tools.append(tool)
    missing = sorted(set(mcp.selected or ()) - set(listed))
    if missing and listed:
        why, fix = "no server has such a tool", f"There are: {', '.join(sorted(listed))}"
        report.problem(f"{base.location}.mcp.tool_selected_list", ", ".join(missing), why, fix)
    return tools


def _build_functions(module: UserModule, report: Report) -> list[BaseTool]:
    try:
        tools = marked_functions(module.load())
    except (RuntimeError, ValueError) as error:
        report.problem(FUNCTIONS, module.path, error_text(error), "Correct the file")
        return []
    if not tools:
        report.problem(
            FUNCTIONS, module.path, "no function is decorated", "Put @function_tool above those that are tools"
        )
    return list(tools)
