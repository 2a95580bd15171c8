"""`rollout.prometheus`: what a replica counts, as text for a Prometheus server, at http://<node>:<port>/metrics."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from dataclasses import fields
from typing import Any

from verl.utils.http_server.asgi import Receive, Response, Send
from verl.utils.http_server.server import Limits, bind_socket, create_server
from verl.workers.rollout.base import BaseRollout, EngineDiedError, Load

__all__ = ["exposition", "serve_metrics"]

logger = logging.getLogger(__name__)

_LIMITS = Limits(connections=64, grace_seconds=1)
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


def serve_metrics(rollout: BaseRollout, replica: int, port: int) -> int:
    """Serve them from a thread for as long as the rollout lives, and return the port (0 takes a free one)."""
    try:
        address = bind_socket("0.0.0.0", port)
    except ValueError as error:
        raise ValueError(f"prometheus.port: {port} of replica {replica} is taken on this machine: {error}") from error
    address.listen(_LIMITS.connections)
    port = address.getsockname()[1]
    app = _Metrics(weakref.ref(rollout), {"engine": rollout.config.name, "replica": str(replica)})
    server = create_server(app, f"metrics of replica {replica}", _LIMITS, "/metrics", signals=False)

    def run() -> None:
        with address:
            asyncio.run(server.serve([address]))

    threading.Thread(target=run, name="rollout-metrics", daemon=True).start()
    weakref.finalize(rollout, setattr, server, "should_exit", True)
    return port


def exposition(load: Load, labels: dict[str, str]) -> str:
    """Prometheus' text format; what an engine does not count is left out."""
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    lines = []
    for item in fields(load):
        value = getattr(load, item.name)
        if value is not None:
            kind, meaning = ("counter" if item.name.endswith("_total") else "gauge"), item.metadata["meaning"]
            name = f"verl_rollout_{item.name}"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name}{{{inside}}} {value:.12g}"]
    return "\n".join([*lines, ""])


class _Metrics:
    """An ASGI app with one page."""

    def __init__(self, rollout: weakref.ref[BaseRollout], labels: dict[str, str]) -> None:
        self._rollout, self._labels = rollout, labels

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        response = Response(send)
        rollout = self._rollout()
        if (scope["method"], scope["path"].rstrip("/")) != ("GET", "/metrics") or rollout is None:
            await response.whole(404, {"detail": "there is GET /metrics, while the engine lives."})
            return
        try:
            load = await asyncio.to_thread(rollout.load)
        except EngineDiedError as error:
            await response.whole(503, {"detail": str(error).splitlines()[0]})
            return
        await response.piece(exposition(load, self._labels), _TEXT)
        await response.end()
