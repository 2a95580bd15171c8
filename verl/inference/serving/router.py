"""Router: one address for several servers of the same model; each request goes to the one with the fewest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl.utils.http_server.asgi import Gone, Receive, Response, Send, headers_of, read_body, while_there

__all__ = ["Router"]

_MOST_BODY = 64 * 2**20
_TOO_LARGE = ValueError("the body is too large")


class Router:
    """An ASGI app. A server that cannot be reached is a 503, which clients of ours try again."""

    def __init__(self) -> None:
        self.servers: dict[str, str] = {}
        """host:port of each, and the key that it wants to be sent; may change at any time."""
        self._under_way: Counter[str] = Counter()
        self._client: Any = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        response = Response(send)
        try:
            try:
                body = await read_body(headers_of(scope), receive, _MOST_BODY, _TOO_LARGE)
            except ValueError as error:
                return await response.whole(413, {"error": {"message": str(error)}})
            await while_there(self._forward(scope, body, response), receive)
        except Gone:
            return

    async def _forward(self, scope: dict[str, Any], body: bytes, response: Response) -> None:
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False)
        if not self.servers:
            return await response.whole(503, {"error": {"message": "no server is there yet"}})
        server = least_busy(list(self.servers), self._under_way)
        kind = headers_of(scope).get("content-type", "")
        headers = {"content-type": kind, "authorization": f"Bearer {self.servers[server]}"}
        self._under_way[server] += 1
        try:
            reply = await self._client.request(
                scope["method"], f"http://{server}{scope['path']}", content=body, headers=headers
            )
        except httpx.TransportError as error:
            return await response.whole(503, {"error": {"message": f"{server} does not answer: {error!r}"}})
        finally:
            self._under_way[server] -= 1
        await response.whole(reply.status_code, json.loads(reply.content))


def least_busy(servers: Sequence[str], under_way: Counter[str]) -> str:
    """The one with the fewest requests under way, the first of those."""
    return min(servers, key=lambda server: under_way[server])
