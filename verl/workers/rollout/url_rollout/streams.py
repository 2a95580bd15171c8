"""StreamedServer: requests to a server over HTTP, one stream of tokens each."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import httpx

from verl.inference.sequence import Sequence
from verl.workers.rollout.served import Piece, Tell
from verl.workers.rollout.url_rollout.server import LOST, Server, ServerError, ServerLostError

__all__ = ["Dialect", "Event", "StreamedServer"]

logger = logging.getLogger(__name__)

# A server that is restarted, or a network that hangs, gets so long.
_BACK_WITHIN_S = 120.0
# From the moment that a server has stopped to the last of its tokens.
_LAST_TOKENS_WITHIN_S = 60.0
_CONNECT_WITHIN_S = 30.0

Event = tuple[list[int], list[float], str | None]
"""Tokens since the event before, their log-probs, and why there will be no more (`abort`: it was made to stop)."""


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

    def pause(self) -> None:
        """End all that runs, and hold what comes; streams then end with what was sampled."""

    def resume(self) -> None: ...

    def forget_prefixes(self) -> None: ...

    def weights_name(self) -> str | None:
        """What the server calls its weights now. None: it does not say."""


class _Stream:
    """A request under way."""

    def __init__(self, name: str, question: dict[str, Any]) -> None:
        self.name = name
        self.question = question
        self.told: list[int] = []
        self.task: asyncio.Task[None] | None = None
        self.silent = True
        """Nothing has come since it was asked for the last time."""


class StreamedServer:
    """A `TokenServer` by HTTP. What is paused ends at the server with what it has, and is asked for again from there.

    A connection that breaks is made again while the server has the same weights; a server that stays away fails
    everybody's request with its URL.
    """

    def __init__(self, dialect: Dialect, tell: Tell) -> None:
        self._dialect = dialect
        self._send = tell
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._streams: dict[str, _Stream] = {}
        self._open: set[_Stream] = set()
        self._paused = False
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(dialect.open_at_once)
        self._rejoining: asyncio.Task[None] | None = None
        self._http = httpx.AsyncClient(
            base_url=dialect.server.url,
            timeout=httpx.Timeout(None, connect=_CONNECT_WITHIN_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-streams", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- TokenServer

    def start(self, sequences: Iterable[Sequence]) -> None:
        streams = [_Stream(sequence.request.id, self._dialect.question(sequence)) for sequence in sequences]
        with self._lock:
            self._streams.update({stream.name: stream for stream in streams})
        self._loop.call_soon_threadsafe(self._launch, streams)

    def abort(self, ids: Iterable[str]) -> None:
        with self._lock:
            gone = [stream for name in ids if (stream := self._streams.pop(name, None)) is not None]
        self._loop.call_soon_threadsafe(_cancel, gone)

    def pause(self) -> None:
        with self._lock:
            self._paused = True
            if not self._open:
                return
        self._dialect.pause()
        # A server that has stopped tells those it knew of. Whoever it does not know of waits there for nothing.
        self._loop.call_soon_threadsafe(self._cancel_silent)
        with self._lock:
            if not self._changed.wait_for(lambda: not self._open, timeout=_LAST_TOKENS_WITHIN_S):
                raise ServerLostError(
                    f"rollout.server_urls: {self._dialect.server.url} was paused and has not ended {len(self._open)}"
                    f" requests within {_LAST_TOKENS_WITHIN_S:.0f} s."
                )

    def resume(self) -> None:
        self._dialect.resume()
        with self._lock:
            self._paused = False
            streams = list(self._streams.values())
        self._loop.call_soon_threadsafe(self._launch, streams)

    def forget_prefixes(self) -> None:
        self._dialect.forget_prefixes()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with self._lock:
            self._streams.clear()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---------------------------------------------------------------- in the loop's thread

    def _launch(self, streams: list[_Stream]) -> None:
        with self._lock:
            for stream in streams:
                waiting = self._streams.get(stream.name) is stream and stream not in self._open
                if waiting and not self._paused:
                    self._open.add(stream)
                    stream.silent = True
                    stream.task = self._loop.create_task(self._run(stream))

    async def _run(self, stream: _Stream) -> None:
        try:
            async with self._slots:
                while not await self._read(stream):
                    pass
        except Exception as error:  # noqa: BLE001 - the request fails with it; nobody else waits for this task
            self._tell(stream, [], [], "error", str(error) or type(error).__name__)
        finally:
            with self._lock:
                self._open.discard(stream)
                self._changed.notify_all()

    async def _read(self, stream: _Stream) -> bool:
        """Ask and listen; False if the connection broke, and there is somebody again to ask."""
        stream.silent = True
        question = self._dialect.continued(stream.question, stream.told) if stream.told else stream.question
        asked_with = len(stream.told)
        try:
            async with self._http.stream("POST", self._dialect.path, json=question) as reply:
                if not reply.is_success:
                    said = (await reply.aread()).decode(errors="replace").strip()
                    raise ServerError(f"{self._dialect.server.url} answered {reply.status_code}: {said[:2000]}")
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        event = self._dialect.event(json.loads(data), len(stream.told) - asked_with)
                        self._tell(stream, *event)
                        if event[2]:
                            return True
            raise httpx.RemoteProtocolError("the answer ended in the middle")
        except LOST as error:
            await self._rejoin(error)
            return False

    async def _rejoin(self, error: Exception) -> None:
        """Wait until the server is there again; whoever lost it waits together."""
        if self._rejoining is None or self._rejoining.done():
            logger.warning(
                "rollout: the connection to %s broke (%s). Waiting up to %.0f s for it.",
                self._dialect.server.url,
                str(error) or type(error).__name__,
                _BACK_WITHIN_S,
            )
            self._rejoining = self._loop.create_task(asyncio.to_thread(self._wait_for_the_same_weights))
        await asyncio.shield(self._rejoining)

    def _wait_for_the_same_weights(self) -> None:
        server = self._dialect.server
        server.wait_until_back(_BACK_WITHIN_S)
        found, known = self._dialect.weights_name(), self._dialect.known_weights
        if found is None or found != known:
            raise ServerLostError(
                f"rollout.server_urls: {server.url} was started anew: its weights are {found!r}, not {known!r}. They"
                " have to be handed over again."
            )

    def _tell(
        self, stream: _Stream, tokens: list[int], log_probs: list[float], ended: str | None, error: str | None = None
    ) -> None:
        with self._lock:
            if self._streams.get(stream.name) is not stream:
                return
            stream.silent = False
            stream.told += tokens
            finished = ended is not None and not (ended == "abort" and self._paused)
            if finished:
                del self._streams[stream.name]
            if tokens or finished:
                self._send([Piece(stream.name, tokens, log_probs, finished, error)])

    def _cancel_silent(self) -> None:
        with self._lock:
            _cancel([stream for stream in self._open if stream.silent])

    async def _end(self) -> None:
        _cancel(list(self._open))
        tasks = [stream.task for stream in self._open if stream.task is not None]
        await asyncio.gather(*tasks, *([self._rejoining] if self._rejoining else []), return_exceptions=True)
        await self._http.aclose()


def _cancel(streams: list[_Stream]) -> None:
    for stream in streams:
        if stream.task is not None:
            stream.task.cancel()
