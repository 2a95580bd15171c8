"""The host of an engine: the program of an engine's process. Makes the engine, then answers its rollout's calls.

`python -m verl.workers.rollout.process.host SOCKET PARENT`. It ends when the other end of the socket does, and when its
engine cannot go on: one of the engine's own processes has ended, or the engine, or its device, has failed for good.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch

from verl.single_controller.base.errors import Failure
from verl.types.request import Output, Request
from verl.utils.activity import current_activity
from verl.utils.exceptions import cause_chain
from verl.utils.logging_setup import setup_logging
from verl.utils.process_tree import die_with_parent, kill_tree_but_trackers
from verl.utils.progress import pulse_count
from verl.workers.rollout.base import BaseRollout, EngineBrokenError
from verl.workers.rollout.engine_start import engine_start
from verl.workers.rollout.process.channel import Channel
from verl.workers.rollout.process.messages import Answers, Call, Facts, Moved, Recipe, Reply, raised_there
from verl.workers.rollout.process.shared_buffer import BucketHandle, BufferHandle, BufferReader

__all__ = ["main"]

_PULSE_S = 0.5
# After these nothing can be computed any more; memory that ran out is none of them.
_FATAL = (EngineBrokenError, torch.AcceleratorError)
# What the host does itself, or in other words; the rest are the engine's methods.
_OWN = frozenset({"build", "submit", "cancel", "open_buffer", "load_bucket", "fail_update", "close"})
# These never wait: they run where messages are received, so that nothing overtakes them.
_AT_ONCE = frozenset({"submit", "cancel", "abort", "resume_generation"})
# These may wait, while others are called.
_BESIDE = frozenset({"pause_generation", "wait_idle", "load", "since"})


class Host:
    """The engine is made, and its weights change, in the main thread: some engines want to live there."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rollout: Any = None  # until it is made
        self._device = torch.device("cpu")
        self._reader = BufferReader()
        self._futures: dict[int, Future[Output]] = {}
        self._finished: queue.SimpleQueue[tuple[int, Future[Output]]] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._closing = False
        for run in (self._keep_receiving, self._keep_answering, self._keep_pulsing):
            threading.Thread(target=_keep, args=[run], name=run.__name__.strip("_"), daemon=True).start()

    def run(self) -> None:
        """Until `close` is called."""
        while True:
            call = self._calls.get()
            self._carry_out(call)
            if call.method == "close":
                return

    # ---------------------------------------------------------------- calls

    def build(self, recipe: Recipe) -> Facts:
        torch.set_num_threads(recipe.threads)
        self._device = torch.device(recipe.device)
        make: Callable[..., BaseRollout] = resolve_name(recipe.at)
        with engine_start(recipe.config.name):
            rollout = make(recipe.model_path, recipe.model_config, recipe.config, self._device)
        self._rollout = rollout
        rollout.watch_processes(self._worker_ended)
        return Facts(
            rollout.version, rollout.weight_dtype, rollout.eos_token_ids, rollout.pad_token_id, rollout.wanted()
        )

    def submit(self, numbers: list[int], requests: list[Request]) -> None:
        for number, future in zip(numbers, self._rollout.submit(requests), strict=True):
            self._futures[number] = future
            future.add_done_callback(partial(self._done, number))

    def cancel(self, number: int) -> None:
        if (future := self._futures.get(number)) is not None:
            future.cancel()

    def open_buffer(self, handle: BufferHandle) -> None:
        self._reader.open(handle)

    def load_bucket(self, handle: BucketHandle) -> None:
        self._rollout.load_bucket(self._reader.bucket(handle))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # when this is replied to, the next bucket overwrites it

    def fail_update(self, failure: Failure) -> None:
        self._rollout.fail_update(raised_there(failure))

    def close(self) -> None:
        self._closing = True
        if self._rollout is not None:
            self._rollout.close()

    def _carry_out(self, call: Call) -> None:
        try:
            reply = Reply(call.number or 0, self._method(call.method)(*call.args))
        except Exception as error:  # noqa: BLE001 - raised where the call was made
            _end_if_fatal(error)
            reply = Reply(call.number or 0, None, Failure.of(error))
            if call.number is None:
                traceback.print_exc()
        if call.number is not None:
            self._channel.send(reply)

    def _method(self, name: str) -> Callable[..., Any]:
        return getattr(self if name in _OWN else self._rollout, name)

    def _worker_ended(self, told: str) -> None:
        if not self._closing:
            _end(f"The engine's {told}: it cannot go on.")

    # ---------------------------------------------------------------- threads

    def _keep_receiving(self) -> None:
        while True:
            call: Call = self._channel.receive()
            if call.method in _AT_ONCE:
                self._carry_out(call)
            elif call.method in _BESIDE:
                threading.Thread(target=self._carry_out, args=[call], name=call.method, daemon=True).start()
            else:
                self._calls.put(call)

    def _done(self, number: int, future: Future[Output]) -> None:
        """In the engine's thread."""
        self._futures.pop(number, None)
        if not future.cancelled():
            self._finished.put((number, future))

    def _keep_answering(self) -> None:
        """All that were finished while the last ones were sent go together."""
        while True:
            finished = [self._finished.get()]
            while not self._finished.empty():
                finished.append(self._finished.get())
            self._channel.send(Answers([(number, _outcome(future)) for number, future in finished]))

    def _keep_pulsing(self) -> None:
        told = pulse_count()
        while True:
            threading.Event().wait(_PULSE_S)
            starting = current_activity()  # reading it counts a new step as progress
            if (now := pulse_count()) != told:
                told = now
                self._channel.send(Moved(None if starting is None else starting.step))


def _keep(run: Callable[[], None]) -> None:
    """Run a thread without which others would wait for ever: the process ends with it."""
    try:
        run()
    except (EOFError, OSError):
        kill_tree_but_trackers(os.getpid())  # nobody is there any more; what the engine started ends with it
    except Exception as error:  # noqa: BLE001 - it is told by the end
        _end("".join(traceback.format_exception(error)))


def _outcome(future: Future[Output]) -> Output | Failure:
    error = future.exception()
    if error is None:
        return future.result()
    _end_if_fatal(error)
    return Failure.of(error)


def _end_if_fatal(error: BaseException) -> None:
    """Who waits for an answer then hears of the end, for which an engine is started anew, with its last lines."""
    if any(isinstance(cause, _FATAL) for cause in cause_chain(error)):
        _end("".join(traceback.format_exception(error)))


def _end(why: str) -> None:
    """At once: what else the engine has started ends with it."""
    sys.stderr.write(f"{why}\n")
    _exit(1)


def _exit(code: int) -> None:
    """Without what an interpreter does at its end: that takes seconds, and an engine's close has ended all there is."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serve the process that started this one."""
    end, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    end.set_inheritable(False)
    die_with_parent()
    if os.getppid() != parent:
        return
    setup_logging()
    Host(Channel(end)).run()
    _exit(0)


if __name__ == "__main__":
    main()
