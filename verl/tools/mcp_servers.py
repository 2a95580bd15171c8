"""Connections to MCP servers (stdio or streamable HTTP, by the official SDK), made again when they break.

They live on an event loop in a thread of their own: the SDK's contexts must be left by the task that entered them, and
tools are loaded before any other loop runs.
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

from verl.tools.base_tool import ToolError
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.concurrency import wait_with_timeout

logger = logging.getLogger(__name__)
T = TypeVar("T")
_CONNECT_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_PING_SECONDS = 5.0
# A server that died unnoticed is found by a ping after such a pause, instead of by the call of a model.
_IDLE_SECONDS = 10.0


class McpServers:
    """The servers that one toolbox talks to."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servers: dict[str, McpServer] = {}

    def get(self, name: str, spec: Mapping[str, Any]) -> McpServer:
        """The server of that description, one connection for all that name it."""
        known = json.dumps([name, spec], sort_keys=True)
        if known not in self._servers:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="verl-mcp", daemon=True).start()
            self._servers[known] = McpServer(name, spec, self._loop)
        return self._servers[known]

    def close(self) -> None:
        """End the connections, and the processes behind those over stdio."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        servers = list(self._servers.values())
        self._servers.clear()

        async def disconnect() -> None:
            await asyncio.gather(*(server.disconnect() for server in servers))

        asyncio.run_coroutine_threadsafe(disconnect(), loop).result()
        loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


class McpServer:
    """One server. Calls may come from any event loop and run side by side."""

    def __init__(self, name: str, spec: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._spec = spec
        self._loop = loop
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[_Connection] | None = None
        self._checks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """For messages: a URL without what may be secret in it, or the command."""
        if "command" in self._spec:
            return str(self._spec["command"])
        parts = urlsplit(str(self._spec["url"]))
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def list_tools(self) -> list[OpenAIFunctionToolSchema]:
        """The server's tools. Blocks: it is asked once, at load."""
        return asyncio.run_coroutine_threadsafe(self._list_tools(), self._loop).result()

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The answer as the protocol writes it (`content`, `isError`, …); ToolError if there is none."""
        return await self._on_loop(self._call(tool, arguments))

    async def ping(self) -> None:
        """ToolError if the server does not answer."""
        await self._on_loop(self._connected(idle=0.0))

    async def disconnect(self) -> None:
        """On the servers' own loop."""
        for task in (*self._checks, *filter(None, [self._opening])):
            task.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _connected(self, idle: float = _IDLE_SECONDS) -> _Connection:
        """A connection that was used less than `idle` seconds ago or answers now; a new one if need be.

        Who comes while it is made waits for the same one, and hears the same error.
        """
        connection = self._connection
        if connection is None or time.monotonic() - connection.used > idle:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.ensure_future(self._reconnect())
            connection = await asyncio.shield(self._opening)
        connection.used = time.monotonic()
        return connection

    async def _reconnect(self) -> _Connection:
        if self._connection is not None:
            await self._drop_if_dead(self._connection)
        if self._connection is None:
            try:
                self._connection = await _Connection.open(self._spec)
            except Exception as error:  # noqa: BLE001 (told without the token)
                raise ToolError(f"MCP server {self.name} ({self.address}): {self._told(error)}") from None
        return self._connection

    async def _drop_if_dead(self, connection: _Connection) -> None:
        try:
            await wait_with_timeout(_PING_SECONDS, connection.session.send_ping())
        except Exception as error:  # noqa: BLE001 (a new connection follows)
            if self._connection is connection:
                self._connection = None
                logger.warning("MCP server %s (%s) was lost: %s", self.name, self.address, self._told(error))
                self._in_background(connection.close())

    async def _list_tools(self) -> list[OpenAIFunctionToolSchema]:
        connection = await self._connected()
        found, cursor = [], None
        while True:
            answer = _dump(await connection.session.list_tools(**_page(connection.session, cursor)))
            found += [_schema_of(tool) for tool in answer["tools"]]
            cursor = answer.get("nextCursor")
            if not cursor:
                return found

    async def _call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        connection = await self._connected()
        try:
            return _dump(await connection.session.call_tool(tool, arguments))
        except asyncio.CancelledError:  # a tool that takes too long, or a server that is gone
            self._suspect(connection)
            raise
        except Exception as error:  # noqa: BLE001 (told without the token)
            self._suspect(connection)
            raise ToolError(f"MCP server {self.name} ({self.address}): {self._told(error)}") from None

    def _suspect(self, connection: _Connection) -> None:
        """Look now whether it still answers; who comes before that is known asks first, too."""
        connection.used = -math.inf
        self._in_background(self._drop_if_dead(connection))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    def _told(self, error: BaseException) -> str:
        """The first real cause, in words without token, keys in the address or headers."""
        while getattr(error, "exceptions", None):
            error = error.exceptions[0]  # type: ignore[attr-defined]
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        address = urlsplit(str(self._spec.get("url") or ""))
        headers = dict(self._spec.get("headers") or {})
        secrets = {self._spec.get("auth_token"), address.query, address.password, *headers.values()}
        for secret in sorted((str(each) for each in secrets if each), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


class _Connection:
    """A session of the SDK, held open by a task of its own."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.session: Any = None
        self.used = 0.0
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._hold(spec))

    @classmethod
    async def open(cls, spec: Mapping[str, Any]) -> _Connection:
        connection = cls(spec)
        try:
            connection.session = await wait_with_timeout(_CONNECT_SECONDS, connection._ready)
        except BaseException:
            connection._task.cancel()
            raise
        return connection

    async def close(self) -> None:
        self._closing.set()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
        self._task.cancel()

    async def _hold(self, spec: Mapping[str, Any]) -> None:
        from mcp import ClientSession

        try:
            async with _streams(spec) as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                self._ready.set_result(session)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 (told to who waits)
            if self._ready.done():
                logger.debug("An MCP connection ended with %r", error)
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
    # Its name, and how it takes headers, before mcp 1.24.
    former: Any = getattr(streamable_http, "streamablehttp_client", None)
    if not hasattr(streamable_http, "streamable_http_client"):
        async with former(spec["url"], headers=headers) as streams:
            yield streams[:2]
        return
    async with (
        create_mcp_http_client(headers=headers) as client,
        streamable_http.streamable_http_client(spec["url"], http_client=client) as streams,
    ):
        yield streams[:2]


def _page(session: Any, cursor: str | None) -> dict[str, Any]:
    if cursor is None:
        return {}
    if "params" not in inspect.signature(session.list_tools).parameters:
        return {"cursor": cursor}
    from mcp.types import PaginatedRequestParams

    return {"params": PaginatedRequestParams(cursor=cursor)}


def _schema_of(tool: dict[str, Any]) -> OpenAIFunctionToolSchema:
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("inputSchema") or {},
    }
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def _dump(answer: Any) -> dict[str, Any]:
    """In the protocol's own names, which are the same in all versions of the SDK."""
    return answer.model_dump(by_alias=True, mode="json")
