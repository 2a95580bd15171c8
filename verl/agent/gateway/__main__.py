"""`python -m verl.agent.gateway --model PATH`: the gateway on the embedded engine, to try an agent outside of training.

Agents talk to http://127.0.0.1:8002/sessions/<any name of theirs>, by the OpenAI or the Anthropic API. DELETE ends a
session and writes it to --out as a line of JSON; so does the end of the program for those that are open.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import uvicorn

from verl.agent.gateway.app import GatewayApp
from verl.agent.gateway.session import Model, Session, Sessions
from verl.inference.serving.app import in_options
from verl.inference.serving.model import Served, ServedModel, add_model_options
from verl.types.request import Output, Request
from verl.utils.http_server.server import Limits, bind_socket, create_server, warn_if_public
from verl.utils.logging_setup import setup_logging
from verl.utils.tool_calls import get_parser

__all__ = ["main"]

DEFAULT_PORT = 8002


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; 2 is the exit code of what cannot be started as asked."""
    options = _parser().parse_args(arguments)
    setup_logging()
    try:
        with bind_socket(options.host, options.port) as taken:
            warn_if_public(taken, "Leave out --host.")
            parser = get_parser(options.format)
            with (
                ServedModel(options).loaded(max_answers=1, client_templates=False) as served,
                contextlib.closing(Model(served.facts, served.tokenizer, parser)) as model,
            ):
                model.start_workers()
                gateway = _Gateway(served, model, options.out)
                server = create_server(gateway.app, served.what, Limits(), "/sessions/<id>")
                asyncio.run(gateway.serve(server, [taken]))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{in_options(str(error))}\n")
        return 2
    return 0


class _Gateway:
    """Sessions that clients name themselves."""

    def __init__(self, served: Served, model: Model, out: Path | None) -> None:
        self._served, self._out = served, out
        self._sessions = Sessions(lambda name: Session(name, self._generate))
        self.app = GatewayApp(self._sessions, model, self._write)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.touch()

    async def serve(self, server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        """Until a signal comes."""
        await server.serve(sockets)
        for name in self._sessions.names:
            await self._write(await self._sessions.close(name))

    async def _generate(self, request: Request) -> AsyncGenerator[Output, None]:
        self._served.check(request)
        async with contextlib.aclosing(self._served.engine.stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def _write(self, session: Session) -> None:
        if self._out is not None:
            with self._out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(session.state(), ensure_ascii=False) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verl.agent.gateway", description=(__doc__ or "").split("\n")[0])
    add_model_options(parser, DEFAULT_PORT)
    parser.add_argument("--format", default="hermes", help="how the model writes calls of tools (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, help="file to which sessions are appended when they end, a line of JSON each"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
