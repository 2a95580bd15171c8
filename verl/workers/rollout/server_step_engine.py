"""ServerStepEngine: adapts an engine that samples on its own (a `TokenServer`) to the `StepEngine` interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from verl.inference.sequence import Sequence
from verl.types.request import Request, TopLogProbs, check_request
from verl.utils.progress import pulse
from verl.workers.rollout.third_party_tokens import accept_reported

# Maximum wait for chunks in one step: requests that are added or removed meanwhile wait as long.
_WAIT_S = 0.005


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one request."""

    id: str
    token_ids: list[int]
    log_probs: list[float]
    """As the engine reports them: see `accept_reported`."""
    finished: bool
    """The last chunk of the request."""
    error: str | Exception | None = None
    """Reason why the request failed."""
    details: ChunkDetails | None = None


@dataclass(frozen=True, slots=True)
class ChunkDetails:
    """Additional results of a request."""

    cached_tokens: int = 0
    """In the first chunk: number of prompt tokens whose KV was in the prefix cache."""
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    """As in `Output`, if requested: one entry per token of the chunk."""
    prompt_log_probs: list[float] = field(default_factory=list)
    """In the first chunk, if requested."""
    prompt_top_log_probs: list[TopLogProbs] = field(default_factory=list)


OnChunks = Callable[[SequenceOf[TokenChunk]], None]
"""Callback that receives new chunks."""


class TokenServer(Protocol):
    """An engine that samples on its own and reports chunks to a callback, from any thread. All methods are
    thread-safe."""

    def start(self, sequences: Iterable[Sequence]) -> None:
        """Continue after `sequence.token_ids` (prompt and generated tokens) up to `sequence.max_length`."""

    def abort(self, ids: Iterable[str]) -> None:
        """Abort requests: none of their chunks is reported afterwards. Never raises, even if the server has ended."""

    def pause(self) -> None:
        """Stop sampling; return when all sampled tokens have been reported."""

    def resume(self) -> None:
        """Resume sampling."""

    def reset_prefix_cache(self) -> None:
        """Requests that are started later must not reuse earlier KV. Called while paused or without requests."""

    def close(self) -> None:
        """Shut down; nothing is reported any more."""


class ServerStepEngine:
    """A `StepEngine` whose step accepts the chunks that a server has reported since the last step."""

    def __init__(
        self,
        connect: Callable[[OnChunks], TokenServer],
        max_length: int,
        after_truncation: bool,
        reports_details: bool = False,
    ) -> None:
        """`connect(on_chunks)` returns the server, which reports to `on_chunks`. `after_truncation`: see
        `accept_reported`. `reports_details`: the server reports top and prompt log-probs, at the request's
        temperature."""
        self.version = 0
        self._max_length = max_length
        self._after_truncation = after_truncation
        self._reports_details = reports_details
        self._chunks: list[TokenChunk] = []
        """Reported chunks that no step has accepted yet."""
        self._chunk_reported = threading.Condition()
        self._waiting: list[Sequence] = []
        self._running: dict[str, Sequence] = {}
        self._paused = False
        self._server = connect(self._on_chunks)

    # ---------------------------------------------------------------- requests

    def check(self, request: Request) -> None:
        check_request(request, self._max_length)
        params = request.params
        if (params.top_log_probs or params.prompt_log_probs) and not self._reports_details:
            raise ValueError(
                f"request {request.id!r}: this engine does not support top_log_probs and prompt_log_probs. Leave them"
                " out, or use rollout.name=native."
            )
        if params.top_log_probs and params.temperature not in (0, 1):
            raise ValueError(
                f"request {request.id!r}: top_log_probs are at temperature 1, but this engine reports them at the"
                f" sampling temperature {params.temperature}. Set temperature to 0 or 1, or use rollout.name=native."
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.max_length = min(sequence.max_length, self._max_length)
            self._waiting.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        removed = set(sequences)
        for sequence in removed:
            sequence.done = True
        self._waiting = [sequence for sequence in self._waiting if sequence not in removed]
        self._stop([name for name, sequence in self._running.items() if sequence in removed])

    # ---------------------------------------------------------------- steps

    def step(self) -> list[Sequence]:
        """Start waiting sequences, and take the chunks that are reported within a few milliseconds."""
        if self._paused:
            self._server.resume()
            self._paused = False
        if self._waiting:
            starting, self._waiting = self._waiting, []
            self._running.update({sequence.request.id: sequence for sequence in starting})
            self._server.start(starting)
        with self._chunk_reported:
            self._chunk_reported.wait_for(lambda: self._chunks, timeout=_WAIT_S)
        return self._take_chunks()

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def in_flight(self) -> bool:
        return bool(self._running) and not self._paused

    def drain(self) -> list[Sequence]:
        """Pause sampling until the next step."""
        if self.in_flight:
            self._paused = True  # also if `pause` fails half-way: the next step resumes
            self._server.pause()
        return self._take_chunks()

    def preempt_all(self) -> None:
        """Restart running sequences from their tokens, before waiting sequences."""
        running = list(self._running.values())
        self._stop(list(self._running))
        self._waiting = running + self._waiting
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        self._server.reset_prefix_cache()

    def clear(self) -> None:
        self._waiting = []
        self._stop(list(self._running))

    def close(self) -> None:
        """Shut down the server. Called after the thread that drives the steps has ended."""
        self._server.close()

    # ---------------------------------------------------------------- chunks

    def _on_chunks(self, chunks: SequenceOf[TokenChunk]) -> None:
        with self._chunk_reported:
            self._chunks += chunks
            self._chunk_reported.notify()

    def _take_chunks(self) -> list[Sequence]:
        """Accept reported chunks; return the sequences that they finish."""
        with self._chunk_reported:
            chunks, self._chunks = self._chunks, []
        if chunks:  # otherwise the server may hang: waiting for it is not progress
            pulse()
        finished: list[Sequence] = []
        still_served: list[str] = []
        for chunk in chunks:
            sequence = self._running.get(chunk.id)
            if sequence is None:
                continue
            if self._accept(sequence, chunk):
                finished.append(sequence)
                if chunk.finished:
                    del self._running[chunk.id]
                else:
                    still_served.append(chunk.id)
        self._stop(still_served)
        return finished

    def _accept(self, sequence: Sequence, chunk: TokenChunk) -> bool:
        """Append a chunk; return whether the sequence has finished or failed."""
        if sequence.done:
            return False
        earlier = len(sequence.output.token_ids)
        ended = accept_reported(sequence, chunk.token_ids, chunk.log_probs, self.version, self._after_truncation)
        if chunk.details is not None:
            _accept_details(sequence, chunk.details, earlier)
        if ended:
            return True
        error = chunk.error
        if chunk.finished and error is None:
            error = (
                f"the engine ended it after {len(sequence)} of at most {sequence.max_length} tokens, without an end"
                " token. Check the engine's own length limit, and whether another client aborts requests."
            )
        if error is None:
            return False
        sequence.done = True
        message = f"rollout: request {chunk.id!r}: {error}"
        sequence.error = error if isinstance(error, Exception) else RuntimeError(message)
        return True

    def _stop(self, ids: list[str]) -> None:
        """Abort requests at the server and discard their chunks."""
        if not ids:
            return
        self._server.abort(ids)
        for name in ids:
            del self._running[name]
        with self._chunk_reported:
            self._chunks = [chunk for chunk in self._chunks if chunk.id in self._running]


def _accept_details(sequence: Sequence, details: ChunkDetails, earlier: int) -> None:
    """Store the details of a chunk. `earlier`: number of generated tokens before it."""
    output = sequence.output
    output.top_log_probs += details.top_log_probs[: len(output.token_ids) - earlier]
    if earlier == 0:
        output.cached_tokens = details.cached_tokens
    if not output.prompt_log_probs:
        last = len(sequence.prompt_ids) - 1
        output.prompt_log_probs = details.prompt_log_probs[:last]
        output.prompt_top_log_probs = details.prompt_top_log_probs[:last]
