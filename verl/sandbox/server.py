"""`python -m verl.sandbox.server`: the local sandbox behind the SandboxFusion API, by default for this machine only.

`POST /run_code` runs a program, `GET /v1/ping` returns "pong", `GET /health` the number of programs. After SIGTERM or
Ctrl-C, running programs may finish within a grace period.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from verl.sandbox import REQUIRE, IsolationMissing, Limits, Sandbox
from verl.sandbox.fusion_api import PING, PONG, RUN, result_to_json
from verl.sandbox.request import RunRequest
from verl.sandbox.types import find_language
from verl.utils.http_server import add_server_options, positive
from verl.utils.http_server.app import HttpError, create_app, json_response, request_body
from verl.utils.http_server.json_body import BodyParser
from verl.utils.http_server.server import (
    ConnectionLimits,
    bind_socket,
    create_server,
    run_event_loop,
    warn_if_public,
)
from verl.utils.logging_setup import setup_logging
from verl.utils.resources import available_cores, use_single_heap

__all__ = ["SandboxServer", "main", "serve"]


logger = logging.getLogger("verl.sandbox.server")  # not "__main__", which is outside the one logging setup

DEFAULT_PORT = 8080


class SandboxServer:
    """Runs `max_concurrent` programs at once and queues up to `max_waiting` more.

    `limits` apply where a request sets no limit (`RunRequest` has defaults for the timeouts); `highest` are the
    highest limits that a request may set.
    """

    def __init__(
        self, sandbox: Sandbox, limits: Limits, highest: Limits, max_concurrent: int, max_waiting: int
    ) -> None:
        self._sandbox, self._limits, self._highest = sandbox, limits, highest
        self._running = asyncio.Semaphore(max_concurrent)
        self._max_admitted, self._admitted = max_concurrent + max_waiting, 0
        self._parser = BodyParser(RunRequest)

    def app(self, max_body_bytes: int, api_key: str | None = None) -> ASGIApp:
        routes = [Route(RUN, self._run_code, methods=["POST"]), Route(PING, self._ping)]
        return create_app(routes, health=self._health, max_body_bytes=max_body_bytes, api_key=api_key)

    def close(self) -> None:
        self._parser.close()

    def _health(self) -> dict[str, Any]:
        return {"status": "ok", "programs": self._admitted, "isolation": self._sandbox.isolation.level}

    async def _ping(self, _request: Request) -> Response:
        return JSONResponse(PONG)

    async def _run_code(self, request: Request) -> Response:
        if self._admitted >= self._max_admitted:
            raise HttpError(503, "too many programs are waiting. Try again later, or raise --max-waiting.")
        self._admitted += 1
        try:
            program = await self._parser.parse(RunRequest, request_body(request))
            try:
                limits = self._limits_for(program)
                find_language(program.language)
                async with self._running:
                    # Cancelled when the client disconnects: the program is killed and its slot is free.
                    run = self._sandbox.submit(
                        program.code,
                        program.language,
                        stdin=program.stdin,
                        files=dict(program.files),
                        fetch=program.fetch_files,
                        limits=limits,
                    )
                    result = await asyncio.wrap_future(run)
            except ValueError as error:  # also a file name outside of the program's directory
                raise HttpError(422, f"{error}.") from error
        finally:
            self._admitted -= 1
        size = len(result.stdout) + len(result.stderr) + sum(map(len, result.files.values()))
        return await json_response(lambda: result_to_json(result), size)

    def _limits_for(self, program: RunRequest) -> Limits:
        memory = self._limits.memory_mb if program.memory_mb is None else program.memory_mb
        for name, value, highest in (
            ("run_timeout", program.run_timeout, self._highest.wall_s),
            ("compile_timeout", program.compile_timeout, self._highest.compile_s),
            ("memory_limit_MB", memory, self._highest.memory_mb),
        ):
            if value > highest:
                raise ValueError(f"{name}: {value:g} is more than this server's maximum of {highest:g}")
        return replace(self._limits, wall_s=program.run_timeout, compile_s=program.compile_timeout, memory_mb=memory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; exit code 2 if the server cannot start with these options."""
    options = _parser().parse_args(arguments)
    setup_logging()
    use_single_heap()
    try:
        serve(options)
    except (ValueError, OSError, IsolationMissing) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def serve(options: argparse.Namespace) -> None:
    """Start the sandbox and serve requests until a signal."""
    limits = Limits(memory_mb=options.memory_limit_mb)
    highest = Limits(wall_s=options.max_seconds, compile_s=options.max_seconds, memory_mb=options.max_memory_mb)
    with bind_socket(options.host, options.port) as bound:
        if options.api_key is None:
            warn_if_public(bound, "They can run programs in it. Set --api-key (or VERL_API_KEY), or leave out --host.")
        sandbox = Sandbox(options.require, limits, options.warm, concurrency=options.max_concurrent)
        with contextlib.closing(sandbox):
            server = SandboxServer(sandbox, limits, highest, options.max_concurrent, options.max_waiting)
            with contextlib.closing(server):
                app = server.app(options.max_body_mb * 2**20, options.api_key)
                http_limits = ConnectionLimits(connections=options.max_connections)
                run_event_loop(create_server(app, "a code sandbox", http_limits).serve([bound]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verl.sandbox.server", description=(__doc__ or "").split("\n")[0])
    add_server_options(parser, DEFAULT_PORT, max_body_mb=32)
    add = parser.add_argument
    require = "minimum isolation; the server does not start with less (default: %(default)s)"
    add("--require", choices=REQUIRE, default="files", help=require)
    add("--warm", type=positive, default=4, help="interpreters kept ready (default: %(default)s)")
    cores = available_cores()
    add("--max-concurrent", type=positive, default=2 * cores, help="programs run at once (default: two per core)")
    add("--max-waiting", type=positive, default=1024, help="programs that may wait (default: %(default)s)")
    memory = "memory of a program whose request sets no limit (default: %(default)s)"
    add("--memory-limit-mb", type=positive, default=1024, help=memory)
    highest = "largest memory limit that a request may set (default: %(default)s)"
    add("--max-memory-mb", type=positive, default=8192, help=highest)
    longest = "longest timeout that a request may set, in seconds (default: %(default)s)"
    add("--max-seconds", type=positive, default=300, help=longest)
    return parser


if __name__ == "__main__":
    sys.exit(main())
