"""AsyncEngine: drives an engine from a thread of its own. Requests come from any thread or event loop.

Sequences join at the next step and leave when they finish. `halt` stops the thread between two steps, for a pause, a
weight update or a release of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

from verl.inference.constraints import AnswerRules
from verl.inference.engine import StepEngine
from verl.inference.sequence import Sequence
from verl.types.request import Output, Request, SamplingParams

__all__ = ["AsyncEngine", "TokenStream", "since", "wake"]

_PAUSE = "pause"
_FAILING = "failing"


class AsyncEngine:
    """Answers requests; the thread is started by the first one. Every method may be called from any thread."""

    def __init__(self, engine: StepEngine, tokenizer: Callable[[], Any] | None = None) -> None:
        """`tokenizer` loads one, when the first request with stop strings or a grammar comes."""
        self._engine = engine
        self._rules = AnswerRules(tokenizer)
        self._changed = threading.Condition()
        # Everybody who is not finished, by id; those the engine does not know yet; those who are to end early.
        self._unfinished: dict[str, Sequence] = {}
        self._arriving: deque[Sequence] = deque()
        self._leaving: list[Sequence] = []
        self._streams: set[TokenStream] = set()
        self._halted_by: set[str] = set()
        self._stepping = False
        self._closing = False
        # While a pause lets earlier requests finish: the last serial that may still be worked on.
        self._last_admitted: float = math.inf
        self._serial = 0
        self._told_tokens = 0
        """Of requests that have ended."""
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int:
        """Version of the weights; written only while halted."""
        return self._engine.version

    @version.setter
    def version(self, version: int) -> None:
        self._engine.version = version

    @property
    def unfinished(self) -> int:
        """How many requests wait or are worked on."""
        return len(self._unfinished)

    def counts(self) -> tuple[int, int, int]:
        """Requests that have a token, those that have none yet, and the tokens of all that there were."""
        with self._changed:
            lengths = [len(sequence.output.token_ids) for sequence in self._unfinished.values()]
            running = sum(length > 0 for length in lengths)
            return running, len(lengths) - running, self._told_tokens + sum(lengths)

    # ---------------------------------------------------------------- requests

    def submit(self, requests: SequenceOf[Request]) -> list[Future[Output]]:
        """Queue all of them in one go, or none; a cancelled future aborts its request."""
        return [sequence.future for sequence in self._submit(requests)]

    async def generate(self, request: Request) -> Output:
        """The answer to one request. Cancelling the awaiting task aborts it."""
        return await asyncio.wrap_future(self.submit([request])[0])

    async def stream(self, request: Request) -> AsyncGenerator[Output, None]:
        """The answer in pieces, as its tokens come; the last piece has a finish reason, the others have "".

        Closing the iterator aborts the request.
        """
        stream = TokenStream(asyncio.get_running_loop())
        sequence = self._submit([request], stream)[0]
        position = 0
        try:
            while not sequence.future.done():
                piece = since(sequence.output, position)
                if piece.token_ids:
                    position += len(piece.token_ids)
                    yield piece
                await stream.more.wait()
                stream.more.clear()
            answer = sequence.future.result()
            yield since(answer, position, answer.finish_reason)
        finally:
            sequence.future.cancel()

    def since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        """Tokens from a position on of those of these requests that are under way and have more."""
        with self._changed:
            sequences = {name: self._unfinished[name] for name in positions if name in self._unfinished}
        pieces = {}
        for name, sequence in sequences.items():
            piece = since(sequence.output, start := positions[name])
            if piece.token_ids:
                piece.routed_experts = sequence.experts_since(start, start + len(piece.token_ids))
                pieces[name] = piece
        return pieces

    def abort(self, ids: Iterable[str] | None) -> None:
        """End requests (None: all) before the next token; their outputs carry what there is."""
        with self._changed:
            if ids is None:
                found = self._everyone()
            else:
                found = [self._unfinished[name] for name in ids if name in self._unfinished]
            for sequence in found:
                self._mark_leaving(sequence)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar, which may take a while; a request with it is then taken at once."""
        self._rules.prepare(params)

    # ---------------------------------------------------------------- standing still

    def halt(self, reason: str) -> None:
        """Return when no step runs and all sampled tokens are taken; none will run until `go(reason)`."""
        with self._changed:
            self._halted_by.add(reason)
            self._changed.notify_all()
            self._wait_until_still()

    def go(self, reason: str) -> None:
        """Take back one reason to stand still."""
        with self._changed:
            self._halted_by.discard(reason)
            self._changed.notify_all()

    def pause(self, mode: str) -> None:
        """Return when sampling has stopped: `finish` completes earlier requests first, `abort` ends them."""
        with self._changed:
            last = self._serial - 1
            if mode == "finish":
                self._last_admitted = last
                self._halted_by.discard(_PAUSE)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing or not self._has_earlier(last))
            self._halted_by.add(_PAUSE)
            if mode == "abort":
                self.abort(None)
                self._changed.wait_for(lambda: self._closing or not self._has_earlier(last))
            self._changed.notify_all()
            self._wait_until_still()

    @property
    def paused(self) -> bool:
        """Whether requests wait for `unpause`."""
        return _PAUSE in self._halted_by

    def unpause(self) -> None:
        """Go on after `pause`."""
        with self._changed:
            self._last_admitted = math.inf
            self.go(_PAUSE)

    def recompute(self, running: bool = True) -> None:
        """Cached KV is void; what runs is computed again from its tokens, if its own is too. Only while halted."""
        with self._changed:
            if running:
                self._engine.requeue_all()
            else:
                self._engine.forget_prefixes()

    def fail(self, error: BaseException) -> None:
        """Every request known now ends with this error."""
        with self._changed:
            self._halted_by.add(_FAILING)
            self._changed.notify_all()
            self._wait_until_still()
            failed = self._forget_everyone()
            self.go(_FAILING)
        for sequence in failed:
            _answer(sequence, error)

    def close(self) -> None:
        """End the thread; what is unfinished fails."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        error = RuntimeError("the rollout engine was closed before this request was finished.")
        for sequence in self._forget_everyone():
            _answer(sequence, error)

    # ---------------------------------------------------------------- taking requests

    def _submit(self, requests: SequenceOf[Request], stream: TokenStream | None = None) -> list[Sequence]:
        sequences = []
        for request in requests:
            self._engine.check(request)
            sequences.append(Sequence(request, 0, self._rules.stop_check(request), self._rules.grammar(request)))
        with self._changed:
            self._enqueue(sequences)
            if stream is not None:
                self._streams.add(stream)
        for sequence in sequences:
            sequence.future.add_done_callback(partial(self._on_done, sequence, stream))
        return sequences

    def _enqueue(self, sequences: list[Sequence]) -> None:
        if self._closing:
            raise RuntimeError("the rollout engine is closed.")
        taken: set[str] = set()
        for sequence in sequences:
            name = sequence.request.id
            if name in taken or name in self._unfinished:
                raise ValueError(f"request {name!r}: the engine is working on a request of this id. Give each its own.")
            taken.add(name)
        for sequence in sequences:
            sequence.serial = self._serial
            self._serial += 1
            self._unfinished[sequence.request.id] = sequence
        self._arriving.extend(sequences)
        if self._thread is None and sequences:
            self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _on_done(self, sequence: Sequence, stream: TokenStream | None, future: Future[Output]) -> None:
        """Called in whichever thread answered or cancelled the future."""
        if stream is not None:
            with self._changed:
                self._streams.discard(stream)
            wake([stream])
        if future.cancelled():
            with self._changed:
                self._mark_leaving(sequence)

    def _mark_leaving(self, sequence: Sequence) -> None:
        if not sequence.aborted:
            sequence.aborted = True
            self._leaving.append(sequence)
            self._changed.notify_all()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closing:
                    return
                left = self._take_leaving()
                self._admit_arriving()
                halted = bool(self._halted_by)
                self._stepping = True
            finished: list[Sequence] = []
            try:
                if halted:
                    finished = self._engine.drain()
                elif self._engine.has_work:
                    finished = self._engine.step()
            except Exception as error:  # noqa: BLE001 - every waiting caller gets it; the thread must outlive it
                for sequence in self._forget_everyone():
                    _answer(sequence, error)
            with self._changed:
                self._stepping = False
                for sequence in finished:
                    self._end(sequence)
                streams = list(self._streams)
                self._changed.notify_all()
            for sequence in left + finished:
                _answer(sequence)
            wake(streams)

    def _take_leaving(self) -> list[Sequence]:
        """Those who are to end early and have not ended by themselves."""
        if not self._leaving:
            return []
        leaving = [s for s in self._leaving if self._unfinished.get(s.request.id) is s]
        self._leaving.clear()
        not_known_yet = self._arriving[0].serial if self._arriving else math.inf
        self._engine.remove([s for s in leaving if s.serial < not_known_yet])
        for sequence in leaving:
            sequence.done = True
            self._end(sequence)
        return leaving

    def _end(self, sequence: Sequence) -> None:
        del self._unfinished[sequence.request.id]
        self._told_tokens += len(sequence.output.token_ids)

    def _admit_arriving(self) -> None:
        """Hand to the engine who has come, as far as a pause allows."""
        admitted = []
        while self._may_admit():
            sequence = self._arriving.popleft()
            if not sequence.done:
                admitted.append(sequence)
        if admitted:
            self._engine.add(admitted)

    def _may_admit(self) -> bool:
        return bool(self._arriving) and self._arriving[0].serial <= self._last_admitted and not self._halted_by

    def _has_work(self) -> bool:
        if self._closing or self._leaving:
            return True
        if self._halted_by:
            return self._engine.in_flight
        return self._engine.has_work or self._may_admit()

    def _wait_until_still(self) -> None:
        self._changed.wait_for(lambda: self._closing or not (self._stepping or self._engine.in_flight))

    def _forget_everyone(self) -> list[Sequence]:
        """Who they were; the engine is left empty."""
        with self._changed:
            everyone = self._everyone()
            for sequence in everyone:
                self._end(sequence)
            self._arriving.clear()
            self._leaving.clear()
            self._engine.clear()
            self._changed.notify_all()
            return everyone

    def _has_earlier(self, last: int) -> bool:
        return any(sequence.serial <= last for sequence in self._unfinished.values())

    def _everyone(self) -> list[Sequence]:
        with self._changed:
            return list(self._unfinished.values())


def _answer(sequence: Sequence, error: BaseException | None = None) -> None:
    """Answer, unless the caller has cancelled meanwhile."""
    error = error or sequence.error
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            sequence.future.set_exception(error)
        else:
            sequence.future.set_result(sequence.output)


class TokenStream:
    """For one request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.more = asyncio.Event()
        """There may be more tokens, or the answer is finished."""


def wake(streams: list[TokenStream]) -> None:
    """From any thread: one call into each event loop, however many wait there."""
    by_loop: dict[asyncio.AbstractEventLoop, list[TokenStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    for loop, waiting in by_loop.items():
        # A loop that was closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_all, waiting)


def since(output: Output, position: int, finish_reason: str = "") -> Output:
    """What came after `position`. The engine may be appending: the versions are written last."""
    here = slice(position, len(output.versions))
    return Output(
        output.token_ids[here],
        output.log_probs[here],
        output.versions[here],
        finish_reason,
        output.raw_log_probs[here],
        output.sampled_log_probs[here],
        output.top_log_probs[here],
        output.prompt_log_probs,
        output.prompt_top_log_probs,
    )


def _set_all(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream.more.set()
