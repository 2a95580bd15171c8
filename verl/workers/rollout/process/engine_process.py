"""EngineProcess: an engine's process as its rollout sees it: started, asked, watched, ended.

What becomes of it is known at once: a thread waits for its end. Whoever waits for an answer then gets the exit code and
the last lines of its log.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout  # another class before Python 3.11
from functools import partial
from pathlib import Path
from typing import Any

from verl.single_controller.base.errors import Failure
from verl.types.request import Output, Request
from verl.utils.activity import activity
from verl.utils.exceptions import RemoteTraceback
from verl.utils.helper_processes import add_helper, remove_helper
from verl.utils.process_tree import describe_exit, kill_group, kill_tree_but_trackers
from verl.utils.progress import pulse
from verl.workers.rollout.base import EngineDiedError
from verl.workers.rollout.process.channel import Channel
from verl.workers.rollout.process.messages import Answers, Call, Facts, Moved, Recipe, Reply, raised_there

__all__ = ["EngineProcess"]

_HOST = "verl.workers.rollout.process.host"
_LAST_LINES = 20
# An engine that was told to end, or whose channel is closed, ends by itself; then it is ended.
_ENDING_S = 10.0


class EngineProcess:
    """One life of an engine's process. Every method may be called from any thread."""

    def __init__(self, recipe: Recipe, environment: Mapping[str, str]) -> None:
        """Returns when the engine is made. `environment` is all of the process's."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Who waits, by number: for the end of a call, for the answer to a request.
        self._replies: dict[int, Future[Any]] = {}
        self._answers: dict[int, Future[Output]] = {}
        self._arrived: queue.SimpleQueue[Answers | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._dismissed = False
        self.death: EngineDiedError | None = None
        self._step: str | None = "starting its process"
        file, self.log = tempfile.mkstemp(prefix="verl-engine-", suffix=".log")
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        started: Future[None] = Future()
        with theirs, os.fdopen(file, "wb") as log:
            command = [sys.executable, "-m", _HOST, str(theirs.fileno()), str(os.getpid())]
            options = {"env": dict(environment), "pass_fds": [theirs.fileno()], "stdout": log, "stderr": log}
            self._start_thread(self._keep_process, started, command, options)
            started.result()
        add_helper(self.pid, lambda: bool(self._replies or self._answers))
        self._start_thread(self._keep_receiving)
        self._start_thread(self._keep_answering)
        with activity(f"starting the {recipe.config.name} engine", lambda: self._step):
            self.facts: Facts = self._built(recipe)

    # ---------------------------------------------------------------- calls

    def begin(self, method: str, *args: Any) -> Future[Any]:
        """Call a method there; its result, when it comes."""
        reply: Future[Any] = Future()
        with self._lock:
            if self.death is not None:
                raise self.death
            number = next(self._numbers)
            self._replies[number] = reply
        self._send(Call(number, method, args))
        return reply

    def ask(self, method: str, *args: Any) -> Any:
        """The result of a method there."""
        return self.begin(method, *args).result()

    def tell(self, method: str, *args: Any) -> None:
        """Call a method there and wait for nothing."""
        if self.death is None:
            self._send(Call(None, method, args))

    def submit(self, requests: list[Request]) -> list[Future[Output]]:
        """Queue requests, all of them or none; a cancelled future aborts its request."""
        with self._lock:
            futures: dict[int, Future[Output]] = {next(self._numbers): Future() for _ in requests}
            self._answers |= futures
        try:
            self.ask("submit", list(futures), requests)
        except BaseException:
            self._forget(futures)
            raise
        for number, future in futures.items():
            future.add_done_callback(partial(self._on_done, number))
        return list(futures.values())

    def close(self) -> None:
        """End it, kindly if it answers."""
        self._dismissed = True
        self._fail_all(RuntimeError("the rollout engine was closed before this request was finished."))
        self._end()

    def discard(self) -> None:
        """End it unasked."""
        self._dismissed = True
        self._kill()

    def _end(self) -> None:
        try:
            with contextlib.suppress(EngineDiedError, FutureTimeout):
                self.begin("close").result(_ENDING_S)
                self._ended.wait(_ENDING_S)
        finally:
            self._kill()

    def _kill(self) -> None:
        """End it, and what it has started; returns when it has ended, or does not."""
        if not self._ended.is_set():
            kill_tree_but_trackers(self.pid)
            if not self._ended.wait(_ENDING_S):
                self._die(f"rollout: the engine's process {self.pid} was killed and does not end. A device that hangs?")

    def _built(self, recipe: Recipe) -> Facts:
        try:
            return self.ask("build", recipe)
        except EngineDiedError:
            raise
        except BaseException as error:
            self._dismissed = not os.path.getsize(self.log)
            if not self._dismissed:  # the processes that it has started tell it that they failed, and their log why
                error.__cause__ = RemoteTraceback(f"{error.__cause__ or ''}\n{_said(self.log)}")
            self._end()
            raise

    def _forget(self, numbers: Iterable[int]) -> list[Future[Output]]:
        with self._lock:
            found = [self._answers.pop(number, None) for number in numbers]
        return [future for future in found if future is not None]

    def _on_done(self, number: int, future: Future[Output]) -> None:
        if future.cancelled():
            self._forget([number])
            self.tell("cancel", number)

    def _fail_all(self, error: Exception) -> None:
        for future in self._forget(list(self._answers)):
            _settle(future, error)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the threads below find out
            self._channel.send(message)

    # ---------------------------------------------------------------- threads

    def _start_thread(self, run: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=run, args=args, name="rollout-process", daemon=True).start()

    def _keep_process(self, started: Future[None], command: list[str], options: dict[str, Any]) -> None:
        """The process ends with the thread that started it: this one, which lives as long as it does."""
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            started.set_exception(error)
            return
        self.pid = process.pid
        started.set_result(None)
        how = describe_exit(process.wait())
        told = f"rollout: the engine's process {process.pid} {how}. {_said(self.log)}"
        kill_group(process.pid)  # what it started, and left
        if self._dismissed:  # else it was named to those who waited for an answer
            Path(self.log).unlink(missing_ok=True)
        self._die(told)

    def _die(self, told: str) -> None:
        """Whoever waits, or asks, hears this."""
        with self._lock:
            self.death = death = self.death or EngineDiedError(told)
            replies, self._replies = self._replies, {}
        remove_helper(self.pid)
        self._ended.set()
        self._channel.close()
        for reply in replies.values():
            reply.set_exception(death)

    def _keep_receiving(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Reply):
                    self._hear(message)
                elif isinstance(message, Answers):
                    self._arrived.put(message)
                elif isinstance(message, Moved):
                    self._step = message.step
                    pulse()
        except (EOFError, OSError):
            if not self._ended.wait(_ENDING_S):
                self._kill()  # it has closed its end, and stays
        self._arrived.put(None)

    def _hear(self, reply: Reply) -> None:
        with self._lock:
            waiting = self._replies.pop(reply.number, None)
        if waiting is None:
            return
        if reply.failure is None:
            waiting.set_result(reply.value)
        else:
            waiting.set_exception(raised_there(reply.failure))

    def _keep_answering(self) -> None:
        """Apart from the thread that receives: who is told of an answer may call the engine again, and wait."""
        while (arrived := self._arrived.get()) is not None:
            for number, output in arrived.outputs:
                for future in self._forget([number]):
                    _settle(future, raised_there(output) if isinstance(output, Failure) else output)
        assert self.death is not None
        self._fail_all(self.death)


def _settle(future: Future[Output], outcome: Output | Exception) -> None:
    """Answer, unless the caller has cancelled meanwhile."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _said(log: str) -> str:
    text = Path(log).read_text(errors="replace") if os.path.exists(log) else ""
    lines = list(filter(str.strip, text.splitlines()))[-_LAST_LINES:]
    said = "\n".join(["Its last lines:", *(f"  {line}" for line in lines)]) if lines else "It said nothing."
    return f"Its log is {log}. {said}"
