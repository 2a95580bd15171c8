"""`rollout.prometheus`: the load and counters of a replica for Prometheus, at http://<node>:<port>/metrics."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from dataclasses import fields

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from verl.types.request import EngineDiedError
from verl.utils.http_server.app import HttpError, create_app
from verl.utils.http_server.server import ConnectionLimits, bind_socket, create_server
from verl.workers.rollout.base import BaseRollout, Load

logger = logging.getLogger(__name__)

_LIMITS = ConnectionLimits(connections=64, grace_seconds=1)
_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def serve_metrics(rollout: BaseRollout, replica: int, port: int) -> int:
    """Serve the metrics of a replica in a thread until the rollout is garbage-collected. Returns the port; `port=0`
    chooses a free port."""
    try:
        address = bind_socket("0.0.0.0", port)
    except ValueError as error:
        raise ValueError(f"prometheus.port: {port} of replica {replica} is taken on this machine: {error}") from error
    address.listen(_LIMITS.connections)
    port = address.getsockname()[1]
    app = _metrics_app(weakref.ref(rollout), {"engine": rollout.config.name, "replica": str(replica)})
    server = create_server(app, f"metrics of replica {replica}", _LIMITS, "/metrics", signals=False)

    def run() -> None:
        with address:
            asyncio.run(server.serve([address]))

    threading.Thread(target=run, name="rollout-metrics", daemon=True).start()
    weakref.finalize(rollout, setattr, server, "should_exit", True)
    return port


def exposition(load: Load, labels: dict[str, str]) -> str:
    """The load in Prometheus' text format; values that the engine does not report are left out."""
    label_text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    lines = []
    for item in fields(load):
        value = getattr(load, item.name)
        if value is not None:
            kind, meaning = ("counter" if item.name.endswith("_total") else "gauge"), item.metadata["meaning"]
            name = f"verl_rollout_{item.name}"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name}{{{label_text}}} {value:.12g}"]
    return "\n".join([*lines, ""])


def _metrics_app(rollout: weakref.ref[BaseRollout], labels: dict[str, str]) -> ASGIApp:
    async def metrics(_request: Request) -> Response:
        engine = rollout()
        if engine is None:
            raise HttpError(503, "the engine has been closed.")
        try:
            load = await asyncio.to_thread(engine.load)
        except EngineDiedError as error:
            raise HttpError(503, str(error).splitlines()[0]) from error
        return Response(exposition(load, labels), media_type=_MEDIA_TYPE)

    return create_app([Route("/metrics", metrics)], health=lambda: {"status": "ok"}, max_body_bytes=0)
