"""`python -m verl.sandbox.server`: the local sandbox behind the SandboxFusion API, for this machine only.

`POST /run_code` runs a program, `GET /v1/ping` answers "pong". SIGTERM and Ctrl-C let runs under way finish for a
while.
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

from verl.utils.http_server.asgi import HttpError, JsonApp
from verl.utils.http_server.protocol import Limits as HttpLimits
from verl.utils.http_server.protocol import asgi_server, bound, warn_if_open
from verl.utils.logging_setup import setup_logging
from verl.utils.process_tree import available_cores
from verl.utils.sandbox import REQUIRE, IsolationMissing, Limits, Sandbox, languages
from verl.utils.sandbox_fusion.wire import PING, PONG, RUN, RunRequest, result_to_json

__all__ = ["SandboxApp", "main", "serve"]

logger = logging.getLogger("verl.sandbox.server")  # not "__main__", which is outside the one logging setup

DEFAULT_PORT = 8080


class SandboxApp:
    """Answers requests with runs of a sandbox, `max_concurrent` at once, up to `max_waiting` more in a queue.

    `most` are the highest limits that a request may ask for.
    """

    def __init__(
        self, sandbox: Sandbox, limits: Limits, most: Limits, max_concurrent: int, max_waiting: int, max_body: int
    ) -> None:
        self._sandbox, self._limits, self._most = sandbox, limits, most
        self._free = asyncio.Semaphore(max_concurrent)
        self._room = max_concurrent + max_waiting
        self._app = JsonApp({("POST", RUN): self._run, ("GET", PING): self._ping}, max_body)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    async def _ping(self, _: Any) -> str:
        return PONG

    async def _run(self, given: Any) -> dict[str, Any]:
        try:
            request = RunRequest.from_json(given)
            limits = self._limits_of(request)
            language, why_not = languages.find(request.language)
            if language is None:
                raise ValueError(why_not)
        except ValueError as error:
            raise HttpError(422, f"{error}.") from error
        if not self._room:
            raise HttpError(503, "too many programs wait to be run. Try again later, or raise --max-waiting.")
        self._room -= 1
        try:
            async with self._free:
                run = self._sandbox.submit(
                    request.code,
                    request.language,
                    stdin=request.stdin,
                    files=dict(request.files),
                    fetch=request.fetch,
                    limits=limits,
                )
                return result_to_json(await asyncio.wrap_future(run))
        except ValueError as error:  # a path that leads out of the directory
            raise HttpError(422, f"{error}.") from error
        finally:
            self._room += 1

    def _limits_of(self, request: RunRequest) -> Limits:
        memory = self._limits.memory_mb if request.memory_mb is None else request.memory_mb
        for name, asked, most in (
            ("run_timeout", request.run_s, self._most.wall_s),
            ("compile_timeout", request.compile_s, self._most.compile_s),
            ("memory_limit_MB", memory, self._most.memory_mb),
        ):
            if asked > most:
                raise ValueError(f"{name}: {asked:g} is more than the {most:g} that this server gives")
        return replace(self._limits, wall_s=request.run_s, compile_s=request.compile_s, memory_mb=memory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; 2 is the exit code of what cannot be started as asked."""
    options = _parser().parse_args(arguments)
    setup_logging()
    try:
        serve(options)
    except (ValueError, OSError, IsolationMissing) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def serve(options: argparse.Namespace) -> None:
    """Start the sandbox, then answer requests."""
    limits = Limits(memory_mb=options.memory_limit_mb)
    most = Limits(wall_s=options.max_seconds, compile_s=options.max_seconds, memory_mb=options.max_memory_mb)
    with bound(options.host, options.port) as taken:
        warn_if_open(taken, "They can run programs in it: leave out --host, or let nobody else reach it.")
        sandbox = Sandbox(options.require, limits, options.warm, concurrency=options.max_concurrent)
        with contextlib.closing(sandbox):
            body = options.max_body_mb * 2**20
            app = SandboxApp(sandbox, limits, most, options.max_concurrent, options.max_waiting, body)
            asyncio.run(asgi_server(app, "a code sandbox", HttpLimits(stalled_seconds=60.0)).serve([taken]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verl.sandbox.server", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to serve on (default: %(default)s, this machine only)")
    add("--port", type=int, default=DEFAULT_PORT, help="port (default: %(default)s; 0: any that is free)")
    add("--require", choices=REQUIRE, default="files", help="isolation without which it does not start (%(default)s)")
    add("--warm", type=_positive, default=4, help="interpreters kept ready (default: %(default)s)")
    cores = available_cores()
    add("--max-concurrent", type=_positive, default=2 * cores, help="programs run at once (default: two per core)")
    add("--max-waiting", type=_positive, default=1024, help="programs that may wait beside (default: %(default)s)")
    add("--memory-limit-mb", type=_positive, default=1024, help="of a program that asks for none (%(default)s)")
    add("--max-memory-mb", type=_positive, default=8192, help="most that a request may ask for (%(default)s)")
    add("--max-seconds", type=_positive, default=300, help="longest time that a request may ask for (%(default)s)")
    add("--max-body-mb", type=_positive, default=32, help="size of one request (default: %(default)s)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
