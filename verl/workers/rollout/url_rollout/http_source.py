"""HTTPSource: answers of a server over HTTP, a connection for each; one that breaks is made again where it was."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import httpx

from verl.inference.sequence import Sequence
from verl.workers.rollout.streamed_server import Event
from verl.workers.rollout.url_rollout import server
from verl.workers.rollout.url_rollout.server import ALIVE, LOST, Server, ServerError, ServerLostError

__all__ = ["Dialect", "HTTPSource"]

logger = logging.getLogger(__name__)

_CONNECT_WITHIN_S = 30.0


class Dialect(Protocol):
    """How one kind of server is spoken to."""

    server: Server
    path: str
    """Where requests go."""
    open_at_once: int
    """Streams that are kept open: enough that the server never runs dry."""
    known_weights: str | None
    """What it called its weights when it was joined, or was told to call those that were handed over last."""

    def question(self, sequence: Sequence) -> dict[str, Any]:
        """What to ask so that this sequence goes on from the tokens that it has."""

    def continued(self, question: dict[str, Any], told: list[int]) -> dict[str, Any]:
        """The same question after these tokens of its answer."""

    def event(self, data: dict[str, Any], seen: int) -> Event:
        """What an event of a stream says, of which `seen` tokens came before."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def forget_prefixes(self) -> None: ...

    def join(self) -> None:
        """Look what it is, as at the start; ServerError if it cannot serve the run."""

    def weights_name(self) -> str | None:
        """What the server calls its weights now. None: it does not say."""


class HTTPSource:
    """A `TokenSource`. It waits for a server that is gone while, and so far as, that one has the same weights."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.open_at_once = dialect.open_at_once
        self.question, self.pause, self.resume = dialect.question, dialect.pause, dialect.resume
        self.forget_prefixes = dialect.forget_prefixes
        self._rejoining: asyncio.Task[None] | None = None
        self._http = httpx.AsyncClient(
            base_url=dialect.server.url,
            timeout=httpx.Timeout(None, connect=_CONNECT_WITHIN_S),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), socket_options=ALIVE
            ),
            trust_env=False,
        )

    async def answer(self, question: dict[str, Any], told: list[int]) -> AsyncGenerator[Event | None, None]:
        while True:
            yield None
            asked = self._dialect.continued(question, told) if told else question
            before = len(told)
            try:
                async with self._http.stream("POST", self._dialect.path, json=asked) as reply:
                    await self._require_success(reply)
                    async for line in reply.aiter_lines():
                        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                            event = self._dialect.event(json.loads(data), len(told) - before)
                            yield event
                            if event[2]:
                                return
                raise httpx.RemoteProtocolError("the answer ended in the middle")
            except LOST as error:
                await self._rejoin(error)

    async def close(self) -> None:
        self._dialect.server.close()
        if self._rejoining is not None:
            await asyncio.wait([self._rejoining])
        await self._http.aclose()

    async def _require_success(self, reply: httpx.Response) -> None:
        if not reply.is_success:
            said = (await reply.aread()).decode(errors="replace").strip()
            raise ServerError(f"{self._dialect.server.url} answered {reply.status_code}: {said[:2000]}")

    async def _rejoin(self, error: Exception) -> None:
        """Wait until the server is there again; whoever lost it waits together."""
        if self._rejoining is None or self._rejoining.done():
            logger.warning(
                "rollout: the connection to %s broke (%s). Waiting up to %.0f s for it.",
                self._dialect.server.url,
                str(error) or type(error).__name__,
                server.BACK_WITHIN_S,
            )
            self._rejoining = asyncio.create_task(asyncio.to_thread(self._wait_for_the_same_weights))
        await asyncio.shield(self._rejoining)

    def _wait_for_the_same_weights(self) -> None:
        self._dialect.server.wait_until_back()
        found, known = self._dialect.weights_name(), self._dialect.known_weights
        if found is None or found != known:
            raise ServerLostError(
                f"rollout.server_urls: {self._dialect.server.url} was started anew: its weights are {found!r}, not"
                f" {known!r}. They have to be handed over again."
            )
