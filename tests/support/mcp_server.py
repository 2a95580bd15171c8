"""An MCP server for tests, built with the official SDK: `python mcp_server.py stdio` or `python mcp_server.py PORT`.

Over HTTP it listens on loopback, requires the token `open-sesame` and appends the path of every accepted request to the
file `$NOTES`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

TOKEN = "open-sesame"
server = MCPServer("test", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def process() -> str:
    return str(os.getpid())


@server.tool()
async def slow() -> str:
    await asyncio.sleep(60)
    return "late"


@server.tool()
def broken() -> str:
    raise ToolError("out of order")


@server.tool()
def search(query: str) -> str:
    results = [{"title": f"About {query}", "content": "It is so."}, {"url": "http://x", "snippet": "Or not."}]
    return json.dumps({"results": results})


class TokenCheck:
    """Rejects HTTP requests without the token."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope.get("headers") or []}
        if scope["type"] == "http" and headers.get("authorization") != f"Bearer {TOKEN}":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"unauthorized"})
            return
        if scope["type"] == "http":
            with Path(os.environ["NOTES"]).open("a") as log:
                log.write(f"{scope['path']}?{scope['query_string'].decode()}\n")
        await self.app(scope, receive, send)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        import uvicorn

        uvicorn.run(
            TokenCheck(server.streamable_http_app()), host="127.0.0.1", port=int(sys.argv[1]), log_level="error"
        )
