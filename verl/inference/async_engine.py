"""AsyncEngine: runs the steps of an engine in a thread; requests are submitted from any thread or event loop.

New sequences join the batch at the next step. `halt` stops the thread between two steps: for a pause, a weight update,
or to release memory.
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

from verl.inference.constraints import OutputConstraints
from verl.inference.engine import StepEngine
from verl.inference.sequence import NO_ADAPTER, Adapter, Sequence
from verl.types.request import Output, Request, SamplingParams

__all__ = ["AsyncEngine", "TokenStream", "notify_streams", "output_since"]

_PAUSE = "pause"
_FAILING = "failing"


class AsyncEngine:
    """Generates outputs for requests. The first request starts the thread. Every method is thread-safe."""

    def __init__(self, engine: StepEngine, tokenizer: Callable[[], Any] | None = None) -> None:
        """`tokenizer` loads the tokenizer; called for the first request with stop strings or a grammar."""
        self.engine = engine
        self.adapters: dict[str, Adapter] = {}
        """Loaded LoRA adapters, which requests select by name."""
        self._constraints = OutputConstraints(tokenizer)
        self._changed = threading.Condition()
        self._unfinished: dict[str, Sequence] = {}
        """Waiting and running sequences, by request id."""
        self._new: deque[Sequence] = deque()
        """Sequences that are not added to the engine yet."""
        self._aborting: list[Sequence] = []
        self.streams: set[TokenStream] = set()
        self._halted_by: set[str] = set()
        self._stepping = False
        self._closing = False
        # While `pause` waits for earlier requests to finish: the last `arrival` that is still admitted.
        self._last_admissible: float = math.inf
        self._next_arrival = 0
        self._finished_tokens = 0
        """Generated tokens of finished requests."""
        self.thread: threading.Thread | None = None

    @property
    def version(self) -> int:
        """Version of the weights; written only while halted."""
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.version = version

    @property
    def unfinished(self) -> int:
        """Number of waiting and running requests."""
        return len(self._unfinished)

    def counts(self) -> tuple[int, int, int]:
        """Return (requests with at least one token, requests without, tokens generated since the start)."""
        with self._changed:
            lengths = [len(sequence.output.token_ids) for sequence in self._unfinished.values()]
            running = sum(length > 0 for length in lengths)
            return running, len(lengths) - running, self._finished_tokens + sum(lengths)

    # ---------------------------------------------------------------- requests

    def submit(self, requests: SequenceOf[Request]) -> list[Future[Output]]:
        """Queue all requests, or none if one is invalid. Cancelling a future aborts its request."""
        return [sequence.future for sequence in self._submit(requests)]

    async def generate(self, request: Request) -> Output:
        """Return the output of one request. Cancelling the awaiting task aborts it."""
        return await asyncio.wrap_future(self.submit([request])[0])

    async def stream(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the output in pieces as tokens are sampled; only the last piece has a finish reason.

        Closing the iterator aborts the request.
        """
        stream = TokenStream(asyncio.get_running_loop())
        sequence = self._submit([request], stream)[0]
        position = 0
        try:
            while not sequence.future.done():
                piece = output_since(sequence.output, position)
                if piece.token_ids:
                    position += len(piece.token_ids)
                    yield piece
                await stream.more.wait()
                stream.more.clear()
            output = sequence.future.result()
            yield output_since(output, position, output.finish_reason)
        finally:
            sequence.future.cancel()

    def tokens_since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        """Return the new outputs of unfinished requests by id, each from its position in `positions` on; empty ones are
        left out."""
        with self._changed:
            sequences = {name: self._unfinished[name] for name in positions if name in self._unfinished}
        pieces = {}
        for name, sequence in sequences.items():
            piece = output_since(sequence.output, start := positions[name])
            if piece.token_ids:
                piece.routed_experts = sequence.experts_since(start, start + len(piece.token_ids))
                pieces[name] = piece
        return pieces

    def abort(self, ids: Iterable[str] | None) -> None:
        """Abort requests (None: all) before the next token; their futures return the partial outputs."""
        with self._changed:
            if ids is None:
                sequences = self.all_unfinished()
            else:
                sequences = [self._unfinished[name] for name in ids if name in self._unfinished]
            for sequence in sequences:
                self._mark_aborted(sequence)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of `params`, so that a later request with it is queued without delay."""
        self._constraints.prepare(params)

    # ---------------------------------------------------------------- halt and pause

    def halt(self, reason: str) -> None:
        """Return when no step runs and all sampled tokens are collected; no step runs until `resume(reason)`."""
        with self._changed:
            self._halted_by.add(reason)
            self._changed.notify_all()
            self._wait_until_halted()

    def resume(self, reason: str) -> None:
        """Remove one reason to halt; steps run again when none is left."""
        with self._changed:
            self._halted_by.discard(reason)
            self._changed.notify_all()

    def pause(self, mode: str) -> None:
        """Return when sampling has stopped. mode=finish completes earlier requests first, mode=abort aborts them."""
        with self._changed:
            last = self._next_arrival - 1
            if mode == "finish":
                self._last_admissible = last
                self._halted_by.discard(_PAUSE)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing or not self._has_unfinished(last))
            self._halted_by.add(_PAUSE)
            if mode == "abort":
                self.abort(None)
                self._changed.wait_for(lambda: self._closing or not self._has_unfinished(last))
            self._changed.notify_all()
            self._wait_until_halted()

    @property
    def paused(self) -> bool:
        """Whether requests are held until `unpause`."""
        return _PAUSE in self._halted_by

    def unpause(self) -> None:
        """Resume sampling after `pause`."""
        with self._changed:
            self._last_admissible = math.inf
            self.resume(_PAUSE)

    def invalidate_kv_cache(self, running: bool = True) -> None:
        """Reset the prefix cache; with `running`, also recompute the KV of running sequences. Only while halted."""
        with self._changed:
            if running:
                self.engine.preempt_all()
            else:
                self.engine.reset_prefix_cache()

    def fail(self, error: BaseException) -> None:
        """Fail every unfinished request with this error."""
        with self._changed:
            self._halted_by.add(_FAILING)
            self._changed.notify_all()
            self._wait_until_halted()
            failed = self._drop_all()
            self.resume(_FAILING)
        for sequence in failed:
            _resolve(sequence, error)

    def close(self) -> None:
        """Stop the thread; unfinished requests fail."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
        error = RuntimeError("the rollout engine was closed before this request was finished.")
        for sequence in self._drop_all():
            _resolve(sequence, error)

    # ---------------------------------------------------------------- submission

    def _submit(self, requests: SequenceOf[Request], stream: TokenStream | None = None) -> list[Sequence]:
        sequences = []
        for request in requests:
            self.engine.check(request)
            stop_check, grammar = self._constraints.stop_check(request), self._constraints.grammar(request)
            sequences.append(Sequence(request, 0, stop_check, grammar))
        with self._changed:
            self._enqueue(sequences)
            if stream is not None:
                self.streams.add(stream)
        for sequence in sequences:
            sequence.future.add_done_callback(partial(self._on_done, sequence, stream))
        return sequences

    def _enqueue(self, sequences: list[Sequence]) -> None:
        if self._closing:
            raise RuntimeError("the rollout engine is closed.")
        new_ids: set[str] = set()
        for sequence in sequences:
            name = sequence.request.id
            if name in new_ids or name in self._unfinished:
                raise ValueError(
                    f"request {name!r}: the engine is already processing a request with this id. Use unique ids."
                )
            new_ids.add(name)
            sequence.adapter = self._adapter_of(sequence.request)
        for sequence in sequences:
            sequence.arrival = self._next_arrival
            self._next_arrival += 1
            self._unfinished[sequence.request.id] = sequence
        self._new.extend(sequences)
        if self.thread is None and sequences:
            self.thread = threading.Thread(target=self._run, name="rollout", daemon=True)
            self.thread.start()
        self._changed.notify_all()

    def _adapter_of(self, request: Request) -> Adapter:
        if request.adapter is None:
            return NO_ADAPTER
        if request.adapter not in self.adapters:
            raise ValueError(f"request {request.id!r}: the LoRA adapter {request.adapter!r} is not loaded.")
        return self.adapters[request.adapter]

    def used_adapters(self) -> set[Adapter]:
        """Adapters of unfinished requests."""
        with self._changed:
            return {sequence.adapter for sequence in self._unfinished.values()}

    def _on_done(self, sequence: Sequence, stream: TokenStream | None, future: Future[Output]) -> None:
        """Runs in the thread that resolved or cancelled the future."""
        if stream is not None:
            with self._changed:
                self.streams.discard(stream)
            notify_streams([stream])
        if future.cancelled():
            with self._changed:
                self._mark_aborted(sequence)

    def _mark_aborted(self, sequence: Sequence) -> None:
        if not sequence.aborted:
            sequence.aborted = True
            self._aborting.append(sequence)
            self._changed.notify_all()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closing:
                    return
                removed = self._remove_aborted()
                self._admit_new()
                halted = bool(self._halted_by)
                self._stepping = True
            finished: list[Sequence] = []
            try:
                if halted:
                    finished = self.engine.drain()
                elif self.engine.has_work:
                    finished = self.engine.step()
            except Exception as error:  # noqa: BLE001 - raised in every waiting caller; the thread must survive
                for sequence in self._drop_all():
                    _resolve(sequence, error)
            with self._changed:
                self._stepping = False
                for sequence in finished:
                    self._discard(sequence)
                streams = list(self.streams)
                self._changed.notify_all()
            for sequence in removed + finished:
                _resolve(sequence)
            notify_streams(streams)

    def _remove_aborted(self) -> list[Sequence]:
        """Remove aborted sequences that have not finished meanwhile; return them."""
        if not self._aborting:
            return []
        aborted = [s for s in self._aborting if self._unfinished.get(s.request.id) is s]
        self._aborting.clear()
        first_new = self._new[0].arrival if self._new else math.inf
        self.engine.remove([s for s in aborted if s.arrival < first_new])
        for sequence in aborted:
            sequence.done = True
            self._discard(sequence)
        return aborted

    def _discard(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence from the unfinished ones."""
        del self._unfinished[sequence.request.id]
        self._finished_tokens += len(sequence.output.token_ids)

    def _admit_new(self) -> None:
        """Add new sequences to the engine, except those that a pause holds back."""
        admitted = []
        while self._may_admit():
            sequence = self._new.popleft()
            if not sequence.done:
                admitted.append(sequence)
        if admitted:
            self.engine.add(admitted)

    def _may_admit(self) -> bool:
        return bool(self._new) and self._new[0].arrival <= self._last_admissible and not self._halted_by

    def _has_work(self) -> bool:
        if self._closing or self._aborting:
            return True
        if self._halted_by:
            return self.engine.in_flight
        return self.engine.has_work or self._may_admit()

    def _wait_until_halted(self) -> None:
        self._changed.wait_for(lambda: self._closing or not (self._stepping or self.engine.in_flight))

    def _drop_all(self) -> list[Sequence]:
        """Remove all sequences from the engine and return them."""
        with self._changed:
            dropped = self.all_unfinished()
            for sequence in dropped:
                self._discard(sequence)
            self._new.clear()
            self._aborting.clear()
            self.engine.clear()
            self._changed.notify_all()
            return dropped

    def _has_unfinished(self, last: int) -> bool:
        """Whether a request that arrived up to `last` is unfinished."""
        return any(sequence.arrival <= last for sequence in self._unfinished.values())

    def all_unfinished(self) -> list[Sequence]:
        with self._changed:
            return list(self._unfinished.values())


def _resolve(sequence: Sequence, error: BaseException | None = None) -> None:
    """Set the future's result or exception, unless the caller has cancelled it."""
    error = error or sequence.error
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            sequence.future.set_exception(error)
        else:
            sequence.future.set_result(sequence.output)


class TokenStream:
    """Notifies a consumer in an event loop of new tokens of one request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.more = asyncio.Event()
        """Set when there may be more tokens, or the request is finished."""


def notify_streams(streams: list[TokenStream]) -> None:
    """Set the events of all streams, with one call into each event loop. Thread-safe."""
    by_loop: dict[asyncio.AbstractEventLoop, list[TokenStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    for loop, waiting in by_loop.items():
        # A closed loop has no consumers.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_all, waiting)


def output_since(output: Output, position: int, finish_reason: str = "") -> Output:
    """Copy of the output from `position` on. Safe while the engine appends: `versions` is written last."""
    new = slice(position, len(output.versions))
    return Output(
        output.token_ids[new],
        output.log_probs[new],
        output.versions[new],
        finish_reason,
        output.raw_log_probs[new],
        output.sampled_log_probs[new],
        output.top_log_probs[new],
        output.prompt_log_probs,
        output.prompt_top_log_probs,
    )


def _set_all(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream.more.set()
