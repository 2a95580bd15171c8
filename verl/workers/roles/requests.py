"""OpenRequests: the engine's answers for other processes. Requests come in by one call, answers leave by another that
waits for them, so that no call is held for as long as an answer takes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial

from verl.config import RolloutConfig
from verl.types.request import Output, Request
from verl.utils.field_errors import keys_under
from verl.utils.helper_processes import Standing, standing_helper
from verl.utils.progress import pulses
from verl.workers.rollout.base import BaseRollout, EngineDiedError

__all__ = ["Answer", "Collected", "OpenRequests"]


@dataclass(frozen=True, slots=True)
class Answer:
    """To one request: an output, or why there is none."""

    id: str
    output: Output | None
    refused: str | None = None
    """The request cannot be answered."""
    failed: str | None = None
    """The engine cannot answer anybody; `OpenRequests.close` raises why."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What one client is told."""

    answers: list[Answer]
    unfinished: int
    """Requests of all clients that the engine has now."""
    pulses: int
    """A number that changes as long as the engine's process moves."""
    closed: bool
    """No more will come."""
    standing: Standing | None = None
    """A process of the engine's that cannot run."""
    pieces: dict[str, Output] = field(default_factory=dict)
    """Where asked for, by request: what was sampled since the last time."""


class OpenRequests:
    """From the beginning of a generation to its end. Every method may be called from any thread."""

    def __init__(self, rollout: BaseRollout) -> None:
        self._rollout = rollout
        self._changed = threading.Condition()
        self._unfinished: dict[str, Future[Output]] = {}
        self._answers: dict[str, list[Answer]] = defaultdict(list)
        # By client and request: how many tokens of it were told.
        self._told: dict[str, dict[str, int]] = defaultdict(dict)
        self._closed = False
        self._error: BaseException | None = None

    def submit(self, client: str, requests: Sequence[Request]) -> None:
        """Queue them, in one go if all can be answered. Never raises: what is wrong is an answer, too."""
        try:
            futures = self._rollout.submit(requests)
        except ValueError as error:
            if len(requests) > 1:
                for request in requests:
                    self.submit(client, [request])
            else:
                self._answer(client, Answer(requests[0].id, None, refused=_spelled(error)))
        except Exception as error:  # noqa: BLE001 - told to whoever asks, raised where the generation ends
            for request in requests:
                self._fail(client, request.id, error)
        else:
            with self._changed:
                self._unfinished |= {request.id: future for request, future in zip(requests, futures, strict=True)}
                for request in requests:
                    self._told[client][request.id] = len(request.resume_from.token_ids) if request.resume_from else 0
                late = self._closed
            for request, future in zip(requests, futures, strict=True):
                future.add_done_callback(partial(self._done, client, request.id))
            if late:
                self.abort(request.id for request in requests)

    def collect(self, client: str, within: float, pieces: bool = False) -> Collected:
        """What was finished for this client since it asked last; waits so many seconds for something."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._answers.get(client)), within)
        came = self._pieces(client) if pieces else {}
        with self._changed:
            return Collected(
                self._answers.pop(client, []), len(self._unfinished), pulses(), self._closed, standing_helper(), came
            )

    def _pieces(self, client: str) -> dict[str, Output]:
        """One call of a client's at a time."""
        with self._changed:
            told = self._told[client]
            known = dict(told)
        try:
            came = self._rollout.since(known)
        except EngineDiedError:  # which its requests are answered with
            return {}
        with self._changed:
            told.update({name: told[name] + len(piece.token_ids) for name, piece in came.items() if name in told})
        return {name: replace(piece, raw_log_probs=[]) for name, piece in came.items()}

    def abort(self, ids: Iterable[str]) -> None:
        """End these at the next token."""
        self._rollout.abort(list(ids))

    def require_sound(self) -> None:
        """Raise what has failed requests, if anything has."""
        if self._error is not None:
            raise self._error

    def forgive(self) -> None:
        """The engine was started anew. Clients were told of what it has failed."""
        self._error = None

    def close(self) -> None:
        """Nobody waits any longer: end what is left, tell all clients, raise what broke the engine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            left = dict(self._unfinished)
        self._rollout.abort(left)
        wait(left.values())
        self.require_sound()

    def _done(self, client: str, name: str, future: Future[Output]) -> None:
        """In the engine's thread."""
        with self._changed:
            self._unfinished.pop(name, None)
            self._told[client].pop(name, None)
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            self._fail(client, name, error)
        else:
            self._answer(client, Answer(name, replace(future.result(), raw_log_probs=[])))

    def _fail(self, client: str, name: str, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
        self._answer(client, Answer(name, None, failed=f"{type(error).__name__}: {error}"))

    def _answer(self, client: str, answer: Answer) -> None:
        with self._changed:
            self._answers[client].append(answer)
            self._changed.notify_all()


def _spelled(error: ValueError) -> str:
    """With the user's keys for the engine's fields."""
    try:
        with keys_under("actor_rollout_ref.rollout", RolloutConfig):
            raise error
    except ValueError as spelled:
        return str(spelled)
