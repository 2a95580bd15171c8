"""Replica: the way to one copy of the engine. Requests of one turn of the event loop leave together; answers come by
one call that stands open, so that nothing is called per token, nor waited for per request."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence

from verl.single_controller.base.handle import RankHandle
from verl.types.request import Output, Request
from verl.types.routed_experts import join_pieces
from verl.utils.helper_processes import Standing, add_peer, remove_peer
from verl.utils.progress import pulse
from verl.workers.roles.requests import Answer, Collected

__all__ = ["EngineLost", "Replica"]

# So long a call for answers stands open. Shorter than what the watch for hangs calls long: each one shows that the
# engine moves.
_STANDING_S = 2.0
# Whoever tells nothing for so long is named, should the run hang.
_SILENT_S = 10.0
# So often an engine is asked for what it has of answers that are not finished.
_PIECES_S = 2.0


class EngineLost(RuntimeError):
    """A replica cannot answer anybody any more."""


class Replica:
    """From an event loop to a replica. Its methods are for that loop's thread."""

    def __init__(
        self,
        handle: RankHandle,
        client: str,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[str], None],
        remembers: bool = False,
    ) -> None:
        """`client` is what answers are collected under; `on_lost` is told why no more will come. `remembers`: what was
        sampled of answers that are not finished, so that they can go on elsewhere."""
        self._handle, self._client, self._loop, self._on_lost = handle, client, loop, on_lost
        self._remembers = remembers
        self._pieces: dict[str, Output] = {}
        self._waiting: dict[str, asyncio.Future[Output]] = {}
        self._leaving: list[Request] = []
        self._others = 0
        self._pulses = 0
        self._closed = False
        self._ended: str | None = None
        self._heard = time.monotonic()
        self._standing: Standing | None = None
        add_peer(self._silence)
        threading.Thread(target=self._keep_collecting, name="agent-replica", daemon=True).start()

    @property
    def load(self) -> int:
        """Requests that it has, as far as is known."""
        return self._others + len(self._waiting)

    @property
    def lost(self) -> bool:
        """It answers nobody any more."""
        return self._ended is not None

    def successor(self, handle: RankHandle) -> Replica:
        """The way to what was started in its place. What is still told of the old one is not for it."""
        self.close()
        return Replica(handle, f"{self._client}'", self._loop, self._on_lost, self._remembers)

    def heard_of(self, request: Request) -> Output:
        """After EngineLost: what there is of its answer, but the last token that was heard of, which is sampled again:
        it may have been the end, and an answer that is finished cannot be taken up."""
        heard = self._pieces.pop(request.id, Output())
        part = slice(0, max(0, len(heard.token_ids) - 1))
        known = Output(heard.token_ids[part], heard.log_probs[part], heard.versions[part])
        known.sampled_log_probs = heard.sampled_log_probs[part]
        if heard.routed_experts is not None and known.token_ids:
            known.routed_experts = heard.routed_experts[:-1]
        return _joined(request.resume_from, known, len(request.prompt_ids))

    async def answer(self, request: Request) -> Output:
        """The answer. Cancelling the awaiting task aborts the request."""
        if self._ended is not None:
            raise EngineLost(self._ended)
        if not self._waiting:
            self._heard = time.monotonic()
        future = self._waiting[request.id] = self._loop.create_future()
        self._leaving.append(request)
        if len(self._leaving) == 1:
            self._loop.call_soon(self._send)
        try:
            return await future
        except asyncio.CancelledError:
            self._pieces.pop(request.id, None)
            if request in self._leaving:  # one that has not left yet never does
                self._leaving.remove(request)
            else:
                self._handle.tell("abort_requests", [request.id])
            raise
        finally:
            self._waiting.pop(request.id, None)

    def abort(self, ids: Sequence[str]) -> None:
        """Have these answered with what there is."""
        self._handle.tell("abort_requests", list(ids))

    def close(self) -> None:
        """Answers are not waited for any longer; tasks that a loop left behind end where they wait."""
        if not self._closed:
            remove_peer(self._silence)
        self._closed = True
        self._ended = self._ended or "the generation is over"
        for future in list(self._waiting.values()):
            future.cancel()

    def _silence(self) -> str | None:
        """Of those who wait for an engine that does not move; from any thread."""
        seconds = time.monotonic() - self._heard
        if not self._waiting or seconds < _SILENT_S:
            return None
        engine = "" if self._standing is None else "; its engine's process (pid {}) is {}".format(*self._standing)
        return f"{self._handle}, whose engine has not moved for {seconds:.0f} s ({len(self._waiting)} requests{engine})"

    def _send(self) -> None:
        requests, self._leaving = self._leaving, []
        if requests:
            self._handle.tell("submit_requests", self._client, requests)

    def _keep_collecting(self) -> None:
        asked = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there
            while not self._closed:
                wanted = [self._client, _STANDING_S]
                if self._remembers and time.monotonic() - asked >= _PIECES_S:
                    asked, wanted = time.monotonic(), [*wanted, True]
                try:
                    collected: Collected = self._handle.ask("collect_outputs", *wanted)
                except Exception as error:  # noqa: BLE001 - told to those who wait
                    self._loop.call_soon_threadsafe(self._lost, f"{type(error).__name__}: {error}")
                    return
                self._loop.call_soon_threadsafe(self._deliver, collected)
                if collected.closed:
                    return

    def _deliver(self, collected: Collected) -> None:
        if collected.pulses != self._pulses:
            self._pulses, self._heard = collected.pulses, time.monotonic()
            pulse()
        self._standing = collected.standing
        for name in collected.pieces.keys() & self._waiting.keys():
            self._pieces[name] = _joined(self._pieces.get(name), collected.pieces[name])
        for answer in collected.answers:
            self._tell(answer)
        self._others = max(0, collected.unfinished - len(self._waiting))
        if collected.closed:
            self._lost("the generation was ended")

    def _tell(self, answer: Answer) -> None:
        future = self._waiting.pop(answer.id, None)
        if answer.failed is not None:
            self._lost(answer.failed)
        else:
            self._pieces.pop(answer.id, None)
        if future is None or future.done():
            return
        if answer.output is not None:
            future.set_result(answer.output)
        elif answer.refused is not None:
            future.set_exception(ValueError(answer.refused))
        else:
            future.set_exception(EngineLost(answer.failed))

    def _lost(self, why: str) -> None:
        known, self._ended = self.lost, self._ended or why
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineLost(why))
        if not known:
            self._on_lost(why)


def _joined(first: Output | None, then: Output, prompt: int | None = None) -> Output:
    """Join two consecutive pieces of an answer. `prompt`: the prompt's length if `first` begins the answer."""
    if first is None:
        return then
    joined = Output(first.token_ids + then.token_ids, first.log_probs + then.log_probs, first.versions + then.versions)
    unknown = [math.nan] * (len(first.token_ids) - len(first.sampled_log_probs))
    joined.sampled_log_probs = first.sampled_log_probs + unknown + then.sampled_log_probs
    rows = 0 if first.routed_experts is None else len(first.routed_experts)
    if prompt is not None and first.token_ids:
        rows = prompt + len(first.token_ids) - 1
    joined.routed_experts = join_pieces(first.routed_experts, rows, then.routed_experts)
    return joined
