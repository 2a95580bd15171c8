"""LocalServer: an ASGI app on a free port of this machine, for as long as somebody is inside."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from verl.utils.http_server.protocol import Limits, asgi_server, bound

__all__ = ["LocalServer"]

# Connections stay open while agents do other things; who is there is ours.
_LIMITS = Limits(connections=8192, idle_seconds=600, grace_seconds=1)


class LocalServer:
    """`async with LocalServer(app, what) as address`: served by the running event loop, at http://127.0.0.1:port."""

    def __init__(self, app: Any, what: str) -> None:
        self._server = asgi_server(app, what, _LIMITS, signals=False)

    async def __aenter__(self) -> str:
        self._socket = bound("127.0.0.1", 0)
        self._socket.listen(2048)  # from here on clients wait instead of being refused
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        await self._task
        self._socket.close()
