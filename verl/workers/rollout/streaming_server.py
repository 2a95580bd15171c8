"""StreamingServer: a `TokenServer` on top of an engine with one token stream per request (HTTP servers, TensorRT-LLM).

Such an engine cannot suspend requests: a pause ends the streams, and after it each request is sent again with a longer
prompt.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from verl.inference.sequence import Sequence
from verl.types.request import Request
from verl.utils.counter_noise import engine_seed
from verl.workers.rollout.third_party import OnChunks, ServerStepEngine, TokenChunk

T = TypeVar("T")

# Timeout of a pause: from the source's pause to the end of all streams.
_PAUSE_TIMEOUT_S = 60.0
# Finish reasons that are no failures.
_FINISH_REASONS = ("stop", "length", "abort")

StreamEvent = tuple[list[int], list[float], str | None]
"""New tokens, their log-probs, and the finish reason or None: `stop`, `length`, `abort` (the request was aborted), or
the engine's name of a failure."""


class TokenSource(Protocol):
    """An engine that answers each request with a stream of tokens."""

    engine: str
    """Name of the engine, for error messages."""
    log: str
    """Where its log is, for error messages."""
    max_streams: int
    """Maximum number of open streams: enough to keep the engine busy."""

    def build_request(self, sequence: Sequence) -> Any:
        """The engine's request that continues a sequence after its tokens."""

    def stream(self, request: Any, generated: list[int]) -> AsyncGenerator[StreamEvent | None, None]:
        """Stream the events of a request. `generated`: its tokens so far; the caller appends the tokens of each event.
        Yields None each time before the request is sent. Closing the generator aborts the request."""

    def pause(self) -> None:
        """Abort running requests and hold new requests; streams end after their last sampled token."""

    def resume(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    async def close(self) -> None: ...


class _Stream:
    """The state of a request."""

    def __init__(self, name: str, request: Any) -> None:
        self.name = name
        self.request = request
        self.generated: list[int] = []
        self.task: asyncio.Task[None] | None = None
        self.unacknowledged = True
        """No event arrived since the request was last sent."""


class StreamingServer:
    """Runs the streams of a `TokenSource` in an event loop in its own thread."""

    def __init__(self, source: TokenSource, on_chunks: OnChunks) -> None:
        self._source = source
        self._on_chunks = on_chunks
        self._lock = threading.RLock()
        self._stream_ended = threading.Condition(self._lock)
        self._streams: dict[str, _Stream] = {}
        """Unfinished requests."""
        self._open: set[_Stream] = set()
        """Requests with a running task."""
        self._paused = False
        self._slots = asyncio.Semaphore(source.max_streams)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-streams", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, sequences: Iterable[Sequence]) -> None:
        streams = [_Stream(sequence.request.id, self._source.build_request(sequence)) for sequence in sequences]
        with self._lock:
            self._streams.update({stream.name: stream for stream in streams})
        self._loop.call_soon_threadsafe(self._launch, streams)

    def abort(self, ids: Iterable[str]) -> None:
        with self._lock:
            aborted = [stream for name in ids if (stream := self._streams.pop(name, None)) is not None]
        self._loop.call_soon_threadsafe(_cancel, aborted)

    def pause(self) -> None:
        with self._lock:
            self._paused = True
            if not self._open:
                return
        self._source.pause()
        # The source ends the streams of requests that it has received. Others would wait until it resumes.
        self._loop.call_soon_threadsafe(self._cancel_unacknowledged)
        with self._lock:
            if not self._stream_ended.wait_for(lambda: not self._open, timeout=_PAUSE_TIMEOUT_S):
                raise RuntimeError(
                    f"rollout: the engine was paused, but did not end {len(self._open)} requests within"
                    f" {_PAUSE_TIMEOUT_S:.0f} s."
                )

    def resume(self) -> None:
        self._source.resume()
        with self._lock:
            self._paused = False
            streams = list(self._streams.values())
        self._loop.call_soon_threadsafe(self._launch, streams)

    def reset_prefix_cache(self) -> None:
        self._source.reset_prefix_cache()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with self._lock:
            self._streams.clear()
        self.call(self._end_streams())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---------------------------------------------------------------- in the event loop

    def _launch(self, streams: list[_Stream]) -> None:
        with self._lock:
            for stream in streams:
                unfinished = self._streams.get(stream.name) is stream and stream not in self._open
                if unfinished and not self._paused:
                    self._open.add(stream)
                    stream.unacknowledged = True
                    stream.task = self._loop.create_task(self._run(stream))

    async def _run(self, stream: _Stream) -> None:
        try:
            async with self._slots, aclosing(self._source.stream(stream.request, stream.generated)) as events:
                async for event in events:
                    if event is None:
                        stream.unacknowledged = True
                        continue
                    self._report(stream, *event)
                    if event[2]:
                        return
            raise RuntimeError(f"the stream of {self._source.engine} ended without a finish reason.")
        except Exception as error:  # noqa: BLE001 - the request fails with it
            self._report(stream, [], [], "error", error)
        finally:
            with self._lock:
                self._open.discard(stream)
                self._stream_ended.notify_all()

    def _report(
        self,
        stream: _Stream,
        tokens: list[int],
        log_probs: list[float],
        finish_reason: str | None,
        error: Exception | str | None = None,
    ) -> None:
        with self._lock:
            if self._streams.get(stream.name) is not stream:
                return
            stream.unacknowledged = False
            stream.generated += tokens
            finished = finish_reason is not None and not (finish_reason == "abort" and self._paused)
            if finished:
                del self._streams[stream.name]
                if error is None and finish_reason not in _FINISH_REASONS:
                    error = (
                        f"{self._source.engine} ended it with finish reason {finish_reason!r}. The cause may be in its"
                        f" log: {self._source.log}."
                    )
            if tokens or finished:
                self._on_chunks([TokenChunk(stream.name, tokens, log_probs, finished, error)])

    def _cancel_unacknowledged(self) -> None:
        with self._lock:
            _cancel([stream for stream in self._open if stream.unacknowledged])

    async def _end_streams(self) -> None:
        tasks = [stream.task for stream in self._open if stream.task is not None]
        _cancel(list(self._open))
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._source.close()


class ResendingStepEngine(ServerStepEngine):
    """The step engine of a `StreamingServer`: after a pause, requests are sent again with their generated tokens."""

    def check(self, request: Request) -> None:
        super().check(request)
        if request.params.presence_penalty or request.params.frequency_penalty:
            raise ValueError(
                f"request {request.id!r}: presence_penalty and frequency_penalty are not supported: this engine treats"
                " tokens generated before a pause as prompt, to which they do not apply. Leave them out, or use"
                " rollout.name=native."
            )


def params_after(params: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the sampling parameters of a request that is sent again after `count` generated tokens. Parameters have
    the names that vLLM and TensorRT-LLM use."""
    remaining = params | {
        "max_tokens": params["max_tokens"] - count,
        "min_tokens": max(0, params["min_tokens"] - count),
    }
    if "seed" in params:
        # Engines draw noise from the first token of a request on, so the continuation needs another seed.
        remaining["seed"] = engine_seed(params["seed"], count)
    return remaining


def _cancel(streams: list[_Stream]) -> None:
    for stream in streams:
        if stream.task is not None:
            stream.task.cancel()
