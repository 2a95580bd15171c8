"""The program of an engine's process: creates the engine and executes the calls of its ProcessRollout.

`python -m verl.workers.rollout.process.host SOCKET PARENT`. It exits when the other end of the socket is closed, and
when the engine cannot continue: one of the engine's processes has ended, or the engine or its device has failed.
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

from verl.single_controller.base.worker_group import Failure
from verl.types.request import EngineBrokenError, Output, Request
from verl.utils.exceptions import cause_chain
from verl.utils.logging_setup import setup_logging
from verl.utils.process_tree import die_with_parent, kill_tree_but_trackers
from verl.utils.progress import current_activity, pulse_count
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.placement import engine_start
from verl.workers.rollout.process.transport import (
    BucketHandle,
    BufferHandle,
    BufferReader,
    EngineInfo,
    EngineSpec,
    FinishedRequests,
    MessageChannel,
    MethodCall,
    MethodReply,
    ProgressReport,
    remote_exception,
)

_PROGRESS_INTERVAL_S = 0.5
# After these errors nothing can be computed any more; out-of-memory errors are not among them.
_FATAL = (EngineBrokenError, torch.AcceleratorError)
# Methods of the host; all other methods are methods of the engine.
_HOST_METHODS = frozenset({"build", "submit", "cancel", "open_buffer", "load_bucket", "fail_update", "close"})
# Methods that never block: executed by the receiving thread, in the order of the calls.
_IMMEDIATE = frozenset({"submit", "cancel", "abort", "resume_generation"})
# Methods that may block while other methods are called: executed in their own threads.
_CONCURRENT = frozenset({"pause_generation", "wait_idle", "load", "tokens_since"})


class EngineProcessHost:
    """Executes calls on the engine. The engine is created, and its weights are changed, in the main thread, which some
    engines require."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel
        self._rollout: Any = None
        """The engine; set by `build`."""
        self._device = torch.device("cpu")
        self._reader = BufferReader()
        self._futures: dict[int, Future[Output]] = {}
        self._finished: queue.SimpleQueue[tuple[int, Future[Output]]] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[MethodCall] = queue.SimpleQueue()
        """Calls for the main thread."""
        self._closing = False
        for run in (self._receive_calls, self._send_finished, self._send_progress):
            threading.Thread(target=_run_or_exit, args=[run], name=run.__name__.strip("_"), daemon=True).start()

    def run(self) -> None:
        """Execute calls in the main thread until `close` is called."""
        while True:
            call = self._calls.get()
            self._execute(call)
            if call.method == "close":
                return

    # ---------------------------------------------------------------- calls

    def build(self, spec: EngineSpec) -> EngineInfo:
        torch.set_num_threads(spec.threads)
        self._device = torch.device(spec.device)
        rollout_class: Callable[..., BaseRollout] = resolve_name(spec.class_path)
        with engine_start(spec.config.name):
            rollout = rollout_class(spec.model_path, spec.model_config, spec.config, self._device)
        self._rollout = rollout
        rollout.watch_processes(self._on_process_end)
        return EngineInfo(
            rollout.version, rollout.weight_dtype, rollout.eos_token_ids, rollout.pad_token_id, rollout.requested_rows()
        )

    def submit(self, numbers: list[int], requests: list[Request]) -> None:
        for number, future in zip(numbers, self._rollout.submit(requests), strict=True):
            self._futures[number] = future
            future.add_done_callback(partial(self._on_request_done, number))

    def cancel(self, number: int) -> None:
        if (future := self._futures.get(number)) is not None:
            future.cancel()

    def open_buffer(self, handle: BufferHandle) -> None:
        self._reader.open(handle)

    def load_bucket(self, handle: BucketHandle) -> None:
        self._rollout.load_bucket(self._reader.bucket(handle))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # after the reply, the next bucket overwrites the buffer

    def fail_update(self, failure: Failure) -> None:
        self._rollout.fail_update(remote_exception(failure))

    def close(self) -> None:
        self._closing = True
        if self._rollout is not None:
            self._rollout.close()

    def _execute(self, call: MethodCall) -> None:
        try:
            target = self if call.method in _HOST_METHODS else self._rollout
            reply = MethodReply(call.number or 0, getattr(target, call.method)(*call.args))
        except Exception as error:  # noqa: BLE001 - raised in the calling process
            _exit_if_fatal(error)
            reply = MethodReply(call.number or 0, None, Failure.from_exception(error))
            if call.number is None:
                traceback.print_exc()
        if call.number is not None:
            self._channel.send(reply)

    def _on_process_end(self, description: str) -> None:
        if not self._closing:
            _fail(f"The engine cannot continue: its {description}.")

    # ---------------------------------------------------------------- threads

    def _receive_calls(self) -> None:
        while True:
            call: MethodCall = self._channel.receive()
            if call.method in _IMMEDIATE:
                self._execute(call)
            elif call.method in _CONCURRENT:
                threading.Thread(target=self._execute, args=[call], name=call.method, daemon=True).start()
            else:
                self._calls.put(call)

    def _on_request_done(self, number: int, future: Future[Output]) -> None:
        """Called by the engine's thread."""
        self._futures.pop(number, None)
        if not future.cancelled():
            self._finished.put((number, future))

    def _send_finished(self) -> None:
        """Send finished requests; requests that finish during a send are sent together."""
        while True:
            finished = [self._finished.get()]
            while not self._finished.empty():
                finished.append(self._finished.get())
            self._channel.send(FinishedRequests([(number, _result(future)) for number, future in finished]))

    def _send_progress(self) -> None:
        reported = pulse_count()
        while True:
            threading.Event().wait(_PROGRESS_INTERVAL_S)
            starting = current_activity()  # reading it counts a new step as progress
            if (now := pulse_count()) != reported:
                reported = now
                self._channel.send(ProgressReport(None if starting is None else starting.step))


def _run_or_exit(run: Callable[[], None]) -> None:
    """Main function of a thread without which the process cannot work: if `run` fails, the process exits."""
    try:
        run()
    except (EOFError, OSError):
        # The rollout's process has ended: exit, together with the processes that the engine started.
        kill_tree_but_trackers(os.getpid())
    except Exception as error:  # noqa: BLE001 - reported by the exit
        _fail("".join(traceback.format_exception(error)))


def _result(future: Future[Output]) -> Output | Failure:
    error = future.exception()
    if error is None:
        return future.result()
    _exit_if_fatal(error)
    return Failure.from_exception(error)


def _exit_if_fatal(error: BaseException) -> None:
    """Exit after an error that the engine does not survive. The rollout then raises EngineDiedError, upon which the
    engine is restarted."""
    if any(isinstance(cause, _FATAL) for cause in cause_chain(error)):
        _fail("".join(traceback.format_exception(error)))


def _fail(reason: str) -> None:
    """Exit at once; the processes that the engine started end with this process."""
    sys.stderr.write(f"{reason}\n")
    _exit(1)


def _exit(code: int) -> None:
    """Exit without the interpreter's shutdown, which takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Execute the calls of the parent process."""
    end, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    end.set_inheritable(False)
    die_with_parent()
    if os.getppid() != parent:
        return
    setup_logging()
    EngineProcessHost(MessageChannel(end)).run()
    _exit(0)


if __name__ == "__main__":
    main()
