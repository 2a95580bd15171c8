"""MCPBaseTool: a tool of an MCP server; the toolbox creates one for every selected tool of an entry's servers.

McpServers: connections to the servers (stdio or streamable HTTP, by the official SDK), reopened when they break. They
live on an event loop in a separate thread: the SDK's contexts must be exited by the task that entered them, and tools
are loaded before any other loop runs.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from verl.tools.base_tool import BaseTool, ToolError
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.concurrency import wait_with_timeout

logger = logging.getLogger(__name__)
T = TypeVar("T")
_CONNECT_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 10.0
_PING_TIMEOUT_S = 5.0
# A connection that was unused for this long is checked with a ping before a call.
_MAX_IDLE_S = 10.0


class MCPBaseTool(BaseTool):
    """Forwards calls to the server. All trajectories of a loop worker share one connection.

    `config`: `timeout` in seconds of one call, `rate_limit` calls per second, `num_workers` concurrent calls.
    """

    schema_is_remote = True
    server: McpServer | None = None
    """Set by the toolbox."""

    async def check(self) -> str | None:
        await self._get_server().ping()
        return None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        call = self._get_server().call(self.name, parameters)
        result = await (wait_with_timeout(float(self.config["timeout"]), call) if "timeout" in self.config else call)
        text = self.text_of(result)
        if result.get("isError"):
            raise ToolError(text)
        return ToolResponse(text=text), None, self.metrics_of(result)

    def text_of(self, result: dict[str, Any]) -> str:
        """The text for the model from the server's result (`content`, `structuredContent`, …). May be overridden."""
        parts = [_block_text(part) for part in result.get("content") or []]
        if not parts and result.get("structuredContent") is not None:
            return json.dumps(result["structuredContent"], ensure_ascii=False)
        return "\n".join(parts)

    def metrics_of(self, result: dict[str, Any]) -> dict[str, Any]:
        """Metrics of the call from the server's result. May be overridden."""
        return {}

    def _get_server(self) -> McpServer:
        if self.server is None:
            raise ToolError(f"{self.name} has no server: create MCP tools with an mcp entry in a tool file")
        return self.server


def _block_text(part: dict[str, Any]) -> str:
    """The text of one content block; a block without text is represented by its type."""
    if part.get("type") == "text":
        return str(part["text"])
    resource = part.get("resource") or part
    if "text" in resource:
        return str(resource["text"])
    return f"[{part.get('type')} {resource.get('mimeType') or resource.get('uri') or ''}]".replace(" ]", "]")


class McpServers:
    """The MCP servers of one toolbox."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servers: dict[str, McpServer] = {}

    def get(self, name: str, spec: Mapping[str, Any]) -> McpServer:
        """The server with this name and `spec`. Tool entries with equal names and specs share a connection."""
        key = json.dumps([name, spec], sort_keys=True)
        if key not in self._servers:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="verl-mcp", daemon=True).start()
            self._servers[key] = McpServer(name, spec, self._loop)
        return self._servers[key]

    def close(self) -> None:
        """Close the connections, and stop the processes of stdio servers."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        servers = list(self._servers.values())
        self._servers.clear()

        async def disconnect() -> None:
            await asyncio.gather(*(server.disconnect() for server in servers))

        asyncio.run_coroutine_threadsafe(disconnect(), loop).result()
        loop.call_soon_threadsafe(loop.stop)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


class McpServer:
    """One server. Its methods may be called from any event loop, concurrently."""

    def __init__(self, name: str, spec: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._spec = spec
        self._loop = loop
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[_Connection] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """For messages: the command, or the URL without credentials and query."""
        if "command" in self._spec:
            return str(self._spec["command"])
        parts = urlsplit(str(self._spec["url"]))
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def list_tools(self) -> list[OpenAIFunctionToolSchema]:
        """The server's tools. Blocks."""
        return asyncio.run_coroutine_threadsafe(self._list_tools(), self._loop).result()

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The result in the protocol's format (`content`, `isError`, …); ToolError if there is none."""
        return await self._on_loop(self._call(tool, arguments))

    async def ping(self) -> None:
        """ToolError if the server does not respond."""
        await self._on_loop(self._get_connection(max_idle_s=0.0))

    async def disconnect(self) -> None:
        """Close the connection. Must run on the servers' event loop."""
        for task in (*self._tasks, *filter(None, [self._opening])):
            task.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _get_connection(self, max_idle_s: float = _MAX_IDLE_S) -> _Connection:
        """A connection that was used less than `max_idle_s` ago or responds to a ping; otherwise a new one.

        Concurrent callers wait for the same attempt and get the same error.
        """
        connection = self._connection
        if connection is None or time.monotonic() - connection.last_used > max_idle_s:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.ensure_future(self._reconnect())
            connection = await asyncio.shield(self._opening)
        connection.last_used = time.monotonic()
        return connection

    async def _reconnect(self) -> _Connection:
        if self._connection is not None:
            await self._drop_if_dead(self._connection)
        if self._connection is None:
            try:
                self._connection = await _Connection.open(self._spec)
            except Exception as error:  # noqa: BLE001 (raised without secrets)
                raise ToolError(f"MCP server {self.name} ({self.address}): {self._describe(error)}") from None
        return self._connection

    async def _drop_if_dead(self, connection: _Connection) -> None:
        try:
            await wait_with_timeout(_PING_TIMEOUT_S, connection.session.send_ping())
        except Exception as error:  # noqa: BLE001 (a new connection follows)
            if self._connection is connection:
                self._connection = None
                logger.warning("MCP server %s (%s) lost connection: %s", self.name, self.address, self._describe(error))
                self.start_task(connection.close())

    async def _list_tools(self) -> list[OpenAIFunctionToolSchema]:
        connection = await self._get_connection()
        schemas, cursor = [], None
        while True:
            page = _dump(await connection.session.list_tools(**_page_keywords(connection.session, cursor)))
            schemas += [_tool_schema(tool) for tool in page["tools"]]
            cursor = page.get("nextCursor")
            if not cursor:
                return schemas

    async def _call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        connection = await self._get_connection()
        try:
            return _dump(await connection.session.call_tool(tool, arguments))
        except asyncio.CancelledError:  # a slow tool, or a dead server
            self._recheck(connection)
            raise
        except Exception as error:  # noqa: BLE001 (raised without secrets)
            self._recheck(connection)
            raise ToolError(f"MCP server {self.name} ({self.address}): {self._describe(error)}") from None

    def _recheck(self, connection: _Connection) -> None:
        """Ping the server in the background; calls that start before the result is known ping it first, too."""
        connection.last_used = -math.inf
        self.start_task(self._drop_if_dead(connection))

    def start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _describe(self, error: BaseException) -> str:
        """The first error of an exception group, with token, URL credentials and headers masked."""
        while getattr(error, "exceptions", None):
            error = error.exceptions[0]  # type: ignore[attr-defined]
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        address = urlsplit(str(self._spec.get("url") or ""))
        headers = dict(self._spec.get("headers") or {})
        secrets = {self._spec.get("auth_token"), address.query, address.password, *headers.values()}
        for secret in sorted((str(secret) for secret in secrets if secret), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


class _Connection:
    """A session of the SDK, kept open by a task."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.session: Any = None
        self.last_used = 0.0
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._keep_open(spec))

    @classmethod
    async def open(cls, spec: Mapping[str, Any]) -> _Connection:
        connection = cls(spec)
        try:
            connection.session = await wait_with_timeout(_CONNECT_TIMEOUT_S, connection._ready)
        except BaseException:
            connection._task.cancel()
            raise
        return connection

    async def close(self) -> None:
        self._closing.set()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({self._task}, timeout=_CLOSE_TIMEOUT_S)
        self._task.cancel()

    async def _keep_open(self, spec: Mapping[str, Any]) -> None:
        from mcp import ClientSession

        try:
            async with _streams(spec) as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                self._ready.set_result(session)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 (raised by `open`)
            if self._ready.done():
                logger.debug("MCP connection closed by %r", error)
            else:
                self._ready.set_exception(error)


@asynccontextmanager
async def _streams(spec: Mapping[str, Any]) -> AsyncIterator[tuple[Any, Any]]:
    if "command" in spec:
        from mcp import StdioServerParameters, stdio_client

        command = {name: spec[name] for name in ("command", "args", "env", "cwd") if spec.get(name) is not None}
        async with stdio_client(StdioServerParameters(**command)) as streams:
            yield streams
        return
    from mcp.client import streamable_http
    from mcp.shared._httpx_utils import create_mcp_http_client

    headers = {**(spec.get("headers") or {})}
    if spec.get("auth_token"):
        headers["Authorization"] = f"Bearer {spec['auth_token']}"
    if not hasattr(streamable_http, "streamable_http_client"):  # mcp before 1.24
        old_client: Any = getattr(streamable_http, "streamablehttp_client")  # noqa: B009 (unknown to newer type stubs)
        async with old_client(spec["url"], headers=headers) as streams:
            yield streams[:2]
        return
    async with (
        create_mcp_http_client(headers=headers) as client,
        streamable_http.streamable_http_client(spec["url"], http_client=client) as streams,
    ):
        yield streams[:2]


def _page_keywords(session: Any, cursor: str | None) -> dict[str, Any]:
    if cursor is None:
        return {}
    if "params" not in inspect.signature(session.list_tools).parameters:
        return {"cursor": cursor}
    from mcp.types import PaginatedRequestParams

    return {"params": PaginatedRequestParams(cursor=cursor)}


def _tool_schema(tool: dict[str, Any]) -> OpenAIFunctionToolSchema:
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("inputSchema") or {},
    }
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def _dump(response: Any) -> dict[str, Any]:
    """A dict with the field names of the protocol, which are the same in all versions of the SDK."""
    return response.model_dump(by_alias=True, mode="json")
