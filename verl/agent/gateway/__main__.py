"""`python -m verl.agent.gateway --model PATH`: the gateway on the embedded engine, to try an agent outside of training.

Agents use http://127.0.0.1:8002/sessions/<name> with the OpenAI or the Anthropic API. The API key that they send is the
secret of the session. A session that is deleted, idle for too long or open when the program ends is written to --out as
a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from verl.agent.gateway.app import GatewayApp
from verl.agent.gateway.session import GatewaySession, Model, Sessions
from verl.inference.serving import add_model_options
from verl.inference.serving.app import in_options
from verl.inference.serving.model import LoadedModel, ModelLoader
from verl.types.request import Output, Request
from verl.utils.http_server import add_server_options, positive
from verl.utils.http_server.app import json_pieces
from verl.utils.http_server.server import (
    ConnectionLimits,
    bind_socket,
    create_server,
    run_event_loop,
    warn_if_public,
)
from verl.utils.logging_setup import setup_logging
from verl.utils.resources import freeze_gc, use_single_heap
from verl.utils.tool_calls import get_parser

__all__ = ["main"]

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8002
_IDLE_CHECK_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; exit code 2 if the server cannot start with these options, 1 if sessions were lost."""
    options = _parser().parse_args(arguments)
    setup_logging()
    use_single_heap()
    try:
        return _serve(options)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{in_options(str(error))}\n")
        return 2


def _serve(options: argparse.Namespace) -> int:
    with bind_socket(options.host, options.port) as bound:
        if options.api_key is None:
            warn_if_public(bound, "Set --api-key (or VERL_API_KEY), or leave out --host.")
        parser = get_parser(options.format)
        with contextlib.ExitStack() as stack:
            loaded = stack.enter_context(ModelLoader(options).load_engine(max_responses=1, client_templates=False))
            model = stack.enter_context(contextlib.closing(Model(loaded.model_info, loaded.tokenizer, parser)))
            model.start_workers()
            freeze_gc()
            gateway, limits = Gateway(loaded, model, options), ConnectionLimits(connections=options.max_connections)
            run_event_loop(
                gateway.serve(create_server(gateway.app, loaded.description, limits, "/sessions/<name>"), bound)
            )
            return 1 if gateway.lost_sessions else 0


class Gateway:
    """The gateway app with its sessions, which clients name; limits their number, size and idle time."""

    def __init__(self, loaded: LoadedModel, model: Model, options: argparse.Namespace) -> None:
        self._loaded, self._out, self._idle_s = loaded, options.out, 60.0 * options.session_idle_minutes
        self._writing = threading.Lock()
        self.lost_sessions = 0
        """Number of sessions that could not be written."""
        limits = {"max_turns": options.max_session_turns, "max_bytes": options.max_session_mb * 2**20}
        self._sessions = Sessions(lambda name: GatewaySession(name, self._generate, **limits), options.max_sessions)
        self.app = GatewayApp(
            self._sessions,
            model,
            self._write,
            max_body_bytes=options.max_body_mb * 2**20,
            api_key=options.api_key,
        )
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.touch()

    async def serve(self, server: uvicorn.Server, bound: socket.socket) -> None:
        """Serve until a signal; then close all sessions."""
        closing_idle = asyncio.create_task(self._close_idle())
        try:
            await server.serve([bound])
        finally:
            closing_idle.cancel()
        await self._close(self._sessions.all())

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(min(_IDLE_CHECK_S, self._idle_s))
            await self._close(self._sessions.idle(self._idle_s))

    async def _close(self, sessions: list[GatewaySession]) -> None:
        for session in sessions:
            await self._sessions.close(session)
            try:
                await self._write(session)
            except Exception:  # the other sessions must still be closed
                self.lost_sessions += 1
                logger.exception("session %s is lost: it could not be written to %s", session.name, self._out)

    async def _generate(self, request: Request) -> AsyncGenerator[Output, None]:
        self._loaded.check(request)
        if request.params.grammar is not None:
            await asyncio.to_thread(self._loaded.engine.prepare, request.params)
        async with contextlib.aclosing(self._loaded.engine.stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def _write(self, session: GatewaySession) -> None:
        """Append the session to the file, in a thread: it is written completely even if the client disconnects."""
        if self._out is not None:
            await asyncio.to_thread(self._append, session.state())

    def _append(self, state: dict[str, Any]) -> None:
        with self._writing:
            descriptor = os.open(self._out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            size = os.fstat(descriptor).st_size
            try:
                with open(descriptor, "ab", closefd=False) as file:
                    file.writelines(piece.encode(errors="backslashreplace") for piece in json_pieces(state))
                    file.write(b"\n")
            except BaseException:
                with contextlib.suppress(OSError):  # half of a line would make the next one invalid, too
                    os.ftruncate(descriptor, size)  # the path may name another file now: logs are rotated
                raise
            finally:
                os.close(descriptor)


def _parser() -> argparse.ArgumentParser:
    secret = (
        "A session needs a secret: the API key that its client sends, or the path /sessions/<name>~<secret>; with"
        " --api-key, only the path."
    )
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m verl.agent.gateway", description=description, epilog=secret)
    add_model_options(parser)
    add_server_options(parser, DEFAULT_PORT, max_body_mb=64)
    add = parser.add_argument
    add("--format", default="hermes", help="format in which the model writes tool calls (default: %(default)s)")
    add("--out", type=Path, help="file to which sessions are appended when they end, a line of JSON each")
    add("--max-sessions", type=positive, default=256, help="open sessions (default: %(default)s)")
    memory = "memory of the messages and tokens of a session in MB; beyond it, requests get 403 (default: %(default)s)"
    add("--max-session-mb", type=positive, default=32, help=memory)
    add("--max-session-turns", type=positive, default=1000, help="responses of a session (default: %(default)s)")
    add(
        "--session-idle-minutes",
        type=positive,
        default=60,
        help="time without a request after which a session ends (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
