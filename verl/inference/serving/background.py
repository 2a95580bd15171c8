"""An app served by a thread of a program that does other things too."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from verl.utils.http_server.protocol import Limits, asgi_server, bound

__all__ = ["served_beside"]

_LOOK_S = 0.01


@contextlib.contextmanager
def served_beside(app: Any, what: str, host: str = "127.0.0.1", limits: Limits | None = None) -> Iterator[int]:
    """The port at which the app answers until this is left."""
    with bound(host, 0) as taken:
        server = asgi_server(app, what, limits or Limits(), "/v1", signals=False)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([taken])), name="server", daemon=True)
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(_LOOK_S)
        try:
            yield int(taken.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
