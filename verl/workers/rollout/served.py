"""ServedStepEngine: an engine that samples by itself and tells of it, as one that is asked for steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from verl.inference.sequence import Sequence
from verl.types.request import Request, TopLogProbs, check_request
from verl.utils.progress import pulse
from verl.workers.rollout.reported_tokens import accept_reported

__all__ = ["Piece", "ServedStepEngine", "Tell", "TokenServer"]

# Longest wait for pieces in one step: requests that arrive or leave meanwhile wait as long.
_WAIT_S = 0.005


@dataclass(frozen=True, slots=True)
class Piece:
    """What came for one request since the piece before."""

    id: str
    token_ids: list[int]
    log_probs: list[float]
    """As the engine reports them: at the temperature, as drawn."""
    finished: bool
    """The server will say no more of it."""
    error: str | Exception | None = None
    """Why it got no further; it alone fails."""
    details: Details | None = None


@dataclass(frozen=True, slots=True)
class Details:
    """What else came for a request."""

    cached_tokens: int = 0
    """With the first piece: tokens of the prompt whose KV was there already."""
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    """As in `Output`, where asked for: one for each token of the piece; with the first piece, those of the prompt."""
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top_log_probs: list[TopLogProbs] = field(default_factory=list)


Tell = Callable[[SequenceOf[Piece]], None]


class TokenServer(Protocol):
    """What samples. Every method may be called from any thread; it may tell of pieces from any."""

    def start(self, sequences: Iterable[Sequence]) -> None:
        """Go on after `sequence.token_ids` (prompt and what was generated) until `sequence.max_length`."""

    def abort(self, ids: Iterable[str]) -> None:
        """No piece of these is told after it returns. Never fails: a server that is gone tells of nobody."""

    def pause(self) -> None:
        """Return when no further token is sampled and all that were have been told."""

    def resume(self) -> None:
        """Sample again."""

    def forget_prefixes(self) -> None:
        """Whoever is started later takes over nobody's KV. Only while paused, or while nobody runs."""

    def close(self) -> None:
        """End it; ids that were started are told of no more."""


class ServedStepEngine:
    """A `StepEngine` whose steps take what a server has told since the last one."""

    def __init__(
        self,
        connect: Callable[[Tell], TokenServer],
        max_length: int,
        after_truncation: bool,
        tells_details: bool = False,
    ) -> None:
        """`connect` gives the server, which tells through its argument; `after_truncation` as in `accept_reported`.

        `tells_details`: it tells of other tokens, and of the prompt's, as it draws: at the request's temperature.
        """
        self.version = 0
        self._max_length = max_length
        self._after_truncation = after_truncation
        self._tells_details = tells_details
        self._told: list[Piece] = []
        self._came = threading.Condition()
        self._waiting: list[Sequence] = []
        self._running: dict[str, Sequence] = {}
        self._paused = False
        self._server = connect(self._tell)

    # ---------------------------------------------------------------- requests

    def check(self, request: Request) -> None:
        check_request(request, self._max_length)
        asked = request.params
        if (asked.top_log_probs or asked.prompt_log_probs) and not self._tells_details:
            raise ValueError(
                f"request {request.id!r}: top_log_probs and prompt_log_probs are not for this engine. Leave them out,"
                " or use rollout.name=native."
            )
        if asked.top_log_probs and asked.temperature not in (0, 1):
            raise ValueError(
                f"request {request.id!r}: top_log_probs are at temperature 1, and this engine tells them as it samples."
                " Set temperature to 0 or 1, or use rollout.name=native."
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.max_length = min(sequence.max_length, self._max_length)
            self._waiting.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        gone = set(sequences)
        for sequence in gone:
            sequence.done = True
        self._waiting = [sequence for sequence in self._waiting if sequence not in gone]
        self._stop([name for name, sequence in self._running.items() if sequence in gone])

    # ---------------------------------------------------------------- steps

    def step(self) -> list[Sequence]:
        """Start who has come, and take what is told within a few milliseconds."""
        if self._paused:
            self._server.resume()
            self._paused = False
        if self._waiting:
            starting, self._waiting = self._waiting, []
            self._running.update({sequence.request.id: sequence for sequence in starting})
            self._server.start(starting)
        with self._came:
            self._came.wait_for(lambda: self._told, timeout=_WAIT_S)
        return self._take()

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def in_flight(self) -> bool:
        return bool(self._running) and not self._paused

    def drain(self) -> list[Sequence]:
        """Sampling stops until the next step."""
        if self.in_flight:
            self._paused = True  # the next step resumes it, also where this fails half-way
            self._server.pause()
        return self._take()

    def requeue_all(self) -> None:
        """What runs is started again from its tokens, before who came later."""
        running = list(self._running.values())
        self._stop(list(self._running))
        self._waiting = running + self._waiting
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        self._server.forget_prefixes()

    def clear(self) -> None:
        self._waiting = []
        self._stop(list(self._running))

    def close(self) -> None:
        """End the server; after the thread that drives this."""
        self._server.close()

    # ---------------------------------------------------------------- pieces

    def _tell(self, pieces: SequenceOf[Piece]) -> None:
        with self._came:
            self._told += pieces
            self._came.notify()

    def _take(self) -> list[Sequence]:
        """Who is finished by what was told."""
        with self._came:
            pieces, self._told = self._told, []
        if pieces:  # else the server may hang: waiting for it is no progress
            pulse()
        finished: list[Sequence] = []
        still_served: list[str] = []
        for piece in pieces:
            sequence = self._running.get(piece.id)
            if sequence is None:
                continue
            if self._accept(sequence, piece):
                finished.append(sequence)
                if piece.finished:
                    del self._running[piece.id]
                else:
                    still_served.append(piece.id)
        self._stop(still_served)
        return finished

    def _accept(self, sequence: Sequence, piece: Piece) -> bool:
        """Whether it ends here, well or not."""
        if sequence.done:
            return False
        known = len(sequence.output.token_ids)
        ends = accept_reported(sequence, piece.token_ids, piece.log_probs, self.version, self._after_truncation)
        if piece.details is not None:
            _accept_details(sequence, piece.details, known)
        if ends:
            return True
        error = piece.error
        if piece.finished and error is None:
            error = (
                f"the engine ended it after {len(sequence)} tokens, {sequence.max_length} were allowed and none of them"
                " ends an answer. Its own limit of length, or somebody else who aborts there?"
            )
        if error is None:
            return False
        sequence.done = True
        told = f"rollout: request {piece.id!r}: {error}"
        sequence.error = error if isinstance(error, Exception) else RuntimeError(told)
        return True

    def _stop(self, ids: list[str]) -> None:
        """The server lets go of them, and what it told of them is void."""
        if not ids:
            return
        self._server.abort(ids)
        for name in ids:
            del self._running[name]
        with self._came:
            self._told = [piece for piece in self._told if piece.id in self._running]


def _accept_details(sequence: Sequence, details: Details, known: int) -> None:
    """`known`: generated tokens before the piece; after those that count, there are none."""
    output = sequence.output
    output.top_log_probs += details.top_log_probs[: len(output.token_ids) - known]
    if known == 0:
        output.cached_tokens = details.cached_tokens
    if not output.prompt_log_probs:
        last = len(sequence.prompt_ids) - 1
        output.prompt_log_probs = details.prompt_log_probs[:last]
        output.prompt_top_log_probs = details.prompt_top_log_probs[:last]
