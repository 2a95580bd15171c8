"""The engine's thread: who is sampled now, who waits, who is done. Plain Python; a runner does the tensor work.

Requests join the running batch at the next token and leave it when they finish. Between two tokens the loop stands
still for whoever asked it to (`halt`): a pause, a weight update, a release of memory.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

from verl.workers.rollout.request import Output, Request

__all__ = ["Activity", "RequestLoop", "Runner"]

_PAUSE = "pause"


class Activity:
    """A request and what it has so far."""

    def __init__(self, request: Request, serial: int) -> None:
        self.request = request
        self.serial = serial
        self.future: Future[Output] = Future()
        self.aborted = False
        earlier = request.resume_from or Output()
        self.output = Output(list(earlier.token_ids), list(earlier.log_probs), list(earlier.versions))
        self.prompt_ids = list(request.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt_ids + self.output.token_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output.token_ids)


Sampled = list[tuple[Activity, int, float]]


class Runner(Protocol):
    """The tensor work. Called by the loop's thread, or while it stands still."""

    def prefill(self, joining: Sequence[Activity]) -> Sampled:
        """Take new sequences in; (sequence, next token, its log-prob) of each."""

    def decode(self) -> Sampled:
        """The next token of every sequence taken in."""

    def leave(self, leaving: Sequence[Activity]) -> None:
        """Forget these sequences."""

    def clear(self) -> None:
        """Forget all sequences and their KV."""


class RequestLoop:
    """Runs requests on a runner in a thread of its own, started by the first request."""

    def __init__(self, runner: Runner, max_sequences: int, max_length: int) -> None:
        self.version = 0
        self._runner = runner
        self._max_sequences = max_sequences
        self._max_length = max_length
        self._waiting: deque[Activity] = deque()
        self._running: list[Activity] = []
        self._changed = threading.Condition()
        self._halted_by: set[str] = set()
        self._stepping = False
        self._closing = False
        # While a pause lets earlier requests finish: the last serial that may still be worked on.
        self._last_admitted: float = math.inf
        self._serial = 0
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- what others ask

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        """Queue all of them in one go, so that equal calls on an idle engine form equal batches."""
        with self._changed:
            if self._closing:
                raise RuntimeError("the rollout engine is closed.")
            taken = {activity.request.id for activity in self._everyone()}
            for request in requests:
                _check(request, self._max_length, taken)
                taken.add(request.id)
            activities = [Activity(request, self._serial + i) for i, request in enumerate(requests)]
            self._serial += len(requests)
            self._waiting.extend(activities)
            if self._thread is None and activities:
                self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return [activity.future for activity in activities]

    def abort(self, ids: Iterable[str] | None) -> None:
        """Mark requests; the thread ends them before the next token."""
        wanted = None if ids is None else set(ids)
        with self._changed:
            for activity in self._everyone():
                activity.aborted |= wanted is None or activity.request.id in wanted
            self._changed.notify_all()

    def halt(self, reason: str) -> None:
        """Return when no token is being computed, and none will be until `go(reason)`."""
        with self._changed:
            self._halted_by.add(reason)
            self._changed.wait_for(lambda: not self._stepping)

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
            self._changed.wait_for(lambda: not self._stepping)

    def unpause(self) -> None:
        """Go on after `pause`."""
        with self._changed:
            self._last_admitted = math.inf
            self.go(_PAUSE)

    def recompute(self) -> None:
        """Drop all KV; running sequences go back to the head of the queue. Only while halted."""
        with self._changed:
            self._waiting.extendleft(sorted(self._running, key=lambda a: -a.serial))
            self._running = []
            self._runner.clear()

    def fail(self, error: BaseException) -> None:
        """Every request known now ends with this error."""
        with self._changed:
            failed = self._everyone()
            self._waiting.clear()
            self._running = []
            self._runner.clear()
            self._changed.notify_all()
        for activity in failed:
            _settle(activity.future, error=error)

    def close(self) -> None:
        """End the thread; what is unfinished fails."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.fail(RuntimeError("the rollout engine was closed before this request was finished."))

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closing:
                    return
                done = self._take_aborted()
                joining = self._take_joining()
                self._stepping = bool(joining or self._may_decode())
            try:
                if self._stepping:
                    done += self._step(joining)
            except Exception as error:  # noqa: BLE001 - every waiting caller gets it; the thread must outlive it
                self.fail(error)
            finally:
                with self._changed:
                    self._stepping = False
                    self._changed.notify_all()
            for activity in done:
                _settle(activity.future, activity.output)

    def _step(self, joining: list[Activity]) -> list[Activity]:
        """One token for those that join, or else for all that run. Returns who is done."""
        sampled = self._runner.prefill(joining) if joining else self._runner.decode()
        done = []
        for activity, token, log_prob in sampled:
            if not math.isfinite(log_prob):
                raise FloatingPointError(
                    f"rollout: weights of version {self.version} give log-prob {log_prob} to token {token} of request"
                    f" {activity.request.id!r}. The weights hold NaN or inf, or overflow in rollout.dtype."
                )
            activity.output.token_ids.append(token)
            activity.output.log_probs.append(log_prob)
            activity.output.versions.append(self.version)
            reason = _finish_reason(activity, self._max_length)
            if reason:
                activity.output.finish_reason = reason
                done.append(activity)
        self._drop(done)
        return done

    def _take_joining(self) -> list[Activity]:
        """Waiting requests that get a place in the batch now, first come first served."""
        joining: list[Activity] = []
        free = self._max_sequences - len(self._running)
        while not self._halted_by and self._waiting and free > len(joining):
            if self._waiting[0].serial > self._last_admitted:
                break
            joining.append(self._waiting.popleft())
        self._running += joining
        return joining

    def _take_aborted(self) -> list[Activity]:
        gone = {a for a in self._everyone() if a.aborted or a.future.cancelled()}
        if gone:
            self._waiting = deque(a for a in self._waiting if a not in gone)
            self._drop([a for a in self._running if a in gone])
        return list(gone)

    def _drop(self, leaving: list[Activity]) -> None:
        if leaving:
            self._runner.leave(leaving)
            gone = set(leaving)
            with self._changed:
                self._running = [activity for activity in self._running if activity not in gone]

    def _has_work(self) -> bool:
        return (
            self._closing
            or any(activity.aborted for activity in self._everyone())
            or self._may_decode()
            or bool(not self._halted_by and self._waiting and self._waiting[0].serial <= self._last_admitted)
        )

    def _may_decode(self) -> bool:
        return bool(self._running) and not self._halted_by

    def _has_earlier(self, last: int) -> bool:
        return any(activity.serial <= last for activity in self._everyone())

    def _everyone(self) -> list[Activity]:
        return [*self._running, *self._waiting]


def _finish_reason(activity: Activity, max_length: int) -> str | None:
    params, tokens = activity.request.params, activity.output.token_ids
    if tokens[-1] in params.ends:
        return "stop"
    return "length" if len(tokens) >= params.max_new_tokens or len(activity) >= max_length else None


def _check(request: Request, max_length: int, taken: set[str]) -> None:
    if request.id in taken:
        raise ValueError(f"request {request.id!r}: the engine is working on a request of this id. Give each its own.")
    if not request.prompt_ids:
        raise ValueError(f"request {request.id!r}: the prompt is empty. Give at least one token.")
    earlier = request.resume_from
    generated = len(earlier.token_ids) if earlier else 0
    if len(request.prompt_ids) + generated >= max_length:
        raise ValueError(
            f"request {request.id!r}: {len(request.prompt_ids)} prompt and {generated} generated tokens leave no room"
            f" in actor_rollout_ref.rollout.max_model_len={max_length}. Raise it, or shorten data.max_prompt_length."
        )
    if earlier and (earlier.finish_reason == "stop" or generated >= request.params.max_new_tokens):
        raise ValueError(
            f"request {request.id!r}: resume_from is finished ({generated} tokens); nothing is left to do."
        )
    if earlier and not len(earlier.token_ids) == len(earlier.log_probs) == len(earlier.versions):
        raise ValueError(f"request {request.id!r}: resume_from needs one log-prob and one version per token.")


def _settle(future: Future[Output], output: Output | None = None, error: BaseException | None = None) -> None:
    """Answer, unless the caller has cancelled meanwhile."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(output or Output())
