"""StreamedServer: an engine that answers each request by a stream of tokens, as a server of tokens to our thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from verl.inference.sequence import Sequence
from verl.types.request import Request
from verl.utils.counter_noise import engine_seed
from verl.workers.rollout.served import Piece, ServedStepEngine, Tell

__all__ = ["Event", "RestartingSteps", "StreamedServer", "TokenSource", "after_tokens"]

T = TypeVar("T")

# From the moment that a source has stopped to the last of its tokens.
_LAST_TOKENS_WITHIN_S = 60.0

Event = tuple[list[int], list[float], str | None]
"""Tokens since the event before, their log-probs, and why there will be no more (`abort`: it was made to stop)."""


class TokenSource(Protocol):
    """What samples."""

    open_at_once: int
    """Streams that are kept open: enough that it never runs dry."""

    def question(self, sequence: Sequence) -> Any:
        """What to ask so that this sequence goes on from the tokens that it has."""

    def answer(self, question: Any, told: list[int]) -> AsyncGenerator[Event | None, None]:
        """What comes of it, after the tokens `told`, which grows by what was yielded; None each time that it is asked.

        Closing it ends the request.
        """

    def pause(self) -> None:
        """End all that runs, and hold what comes; streams then end with what was sampled."""

    def resume(self) -> None: ...

    def forget_prefixes(self) -> None: ...

    async def close(self) -> None: ...


class _Stream:
    """A request under way."""

    def __init__(self, name: str, question: Any) -> None:
        self.name = name
        self.question = question
        self.told: list[int] = []
        self.task: asyncio.Task[None] | None = None
        self.silent = True
        """Nothing has come since it was asked for the last time."""


class StreamedServer:
    """A `TokenServer`. What is paused ends at the source with what it has, and is asked for again from there."""

    def __init__(self, source: TokenSource, tell: Tell) -> None:
        self._source = source
        self._send = tell
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._streams: dict[str, _Stream] = {}
        self._open: set[_Stream] = set()
        self._paused = False
        self._slots = asyncio.Semaphore(source.open_at_once)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-streams", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, in the loop of the streams."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, sequences: Iterable[Sequence]) -> None:
        streams = [_Stream(sequence.request.id, self._source.question(sequence)) for sequence in sequences]
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
        self._source.pause()
        # A source that has stopped ends those it knew of. Whoever it does not know of waits there for nothing.
        self._loop.call_soon_threadsafe(self._cancel_silent)
        with self._lock:
            if not self._changed.wait_for(lambda: not self._open, timeout=_LAST_TOKENS_WITHIN_S):
                raise RuntimeError(
                    f"rollout: the engine was paused and has not ended {len(self._open)} requests within"
                    f" {_LAST_TOKENS_WITHIN_S:.0f} s."
                )

    def resume(self) -> None:
        self._source.resume()
        with self._lock:
            self._paused = False
            streams = list(self._streams.values())
        self._loop.call_soon_threadsafe(self._launch, streams)

    def forget_prefixes(self) -> None:
        self._source.forget_prefixes()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with self._lock:
            self._streams.clear()
        self.call(self._end())
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
            async with self._slots, aclosing(self._source.answer(stream.question, stream.told)) as events:
                async for event in events:
                    if event is None:
                        stream.silent = True
                        continue
                    self._tell(stream, *event)
                    if event[2]:
                        return
            raise RuntimeError("the engine's answer ended in the middle.")
        except Exception as error:  # noqa: BLE001 - the request fails with it; nobody else waits for this task
            self._tell(stream, [], [], "error", error)
        finally:
            with self._lock:
                self._open.discard(stream)
                self._changed.notify_all()

    def _tell(
        self,
        stream: _Stream,
        tokens: list[int],
        log_probs: list[float],
        ended: str | None,
        error: Exception | None = None,
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
        tasks = [stream.task for stream in self._open if stream.task is not None]
        _cancel(list(self._open))
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._source.close()


class RestartingSteps(ServedStepEngine):
    """The steps of a `StreamedServer`: what goes on after a pause is to the engine a request with a longer prompt."""

    def check(self, request: Request) -> None:
        super().check(request)
        asked = request.params
        if asked.presence_penalty or asked.frequency_penalty:
            raise ValueError(
                f"request {request.id!r}: this engine counts what was generated before a pause as prompt, where"
                " presence_penalty and frequency_penalty do not look. Leave them out, or use rollout.name=native."
            )


def after_tokens(asked: dict[str, Any], count: int) -> dict[str, Any]:
    """Sampling parameters (as vLLM and TensorRT-LLM name them) for what is left after `count` tokens of the answer."""
    left = asked | {"max_tokens": asked["max_tokens"] - count, "min_tokens": max(0, asked["min_tokens"] - count)}
    if "seed" in asked:
        # Noise is drawn from the first token of a request on: what goes on gets noise of its own.
        left["seed"] = engine_seed(asked["seed"], count)
    return left


def _cancel(streams: list[_Stream]) -> None:
    for stream in streams:
        if stream.task is not None:
            stream.task.cancel()
