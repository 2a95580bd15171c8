"""ProcessPool: calls in processes of their own, where hanging or dying costs one call and no more.

`submit(function, *arguments, timeout=…)` gives a future, `gathered(…)` waits for many. One thread deals calls out to
workers, several per message, and watches the clock of each, which runs while the call does (not while it imports
something, nor while others have the processor). What was sent with one that takes long goes to others.

A call that takes long and only waits (for a network, a lock, for ever) needs no processor, so a fresh worker takes its
place beside it: any number of these, up to some hundreds, cost one time limit. One that computes for ever keeps its
place until its time is up: k of them cost k × timeout / processes.

A worker, or the process that forks them, may be killed or stopped by somebody else. That is no fault of the calls: they
are made again, in a new one, a few times at most.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from verl.utils import process_tree
from verl.utils.exceptions import RemoteTraceback
from verl.utils.process_pool.errors import CannotSend, InitializerError, PoolClosed, ProcessDied, TaskTimeout
from verl.utils.process_pool.fork_server import GROWN, IMPORTING, MEMORY, MODULES, RETURNED
from verl.utils.process_pool.processes import (
    FROM_OUTSIDE,
    LOOK_SECONDS,
    Done,
    ForkServer,
    Pace,
    Task,
    Worker,
    ending_in_words,
    portable,
)
from verl.utils.progress import expect, tick

logger = logging.getLogger(__name__)

_MOST_BESIDE = 256
# Processes that a call may lose to others; one that ends each of its processes itself cannot be told from that at once.
_MOST_LOST = 3
_TICK_SECONDS = 0.5

LOW_PRIORITY = 5
"""The `nice` of processes that work for clients of a server: the server itself comes first."""


class ProcessPool:
    """Up to `processes` workers, forked by a server that starts from scratch with the first call.

    `initializer` runs once, in that server: what it loads, every worker has. It and functions that cannot be imported
    travel by content (cloudpickle). A worker may take `memory_limit` bytes beyond what is loaded when it starts. One
    that holds `max_growth` bytes more after a call than when it started is replaced. With `prefork`, all workers are
    forked when the server has started, and not only when calls need them.

    An argument that is a `pickle.PickleBuffer` of bytes is not copied in this process; the function receives bytes.
    """

    def __init__(
        self,
        processes: int,
        *,
        initializer: Callable[[], object] | None = None,
        memory_limit: int | None = None,
        max_growth: int | None = None,
        prefork: bool = False,
    ) -> None:
        self._processes = processes
        self._initializer = initializer
        self._memory_limit, self._max_growth, self._prefork = memory_limit, max_growth, prefork
        self._waiting: deque[Task] = deque()
        self._workers: dict[int, Worker] = {}
        self._pace = Pace()
        self._servers_lost = 0  # since the last answer
        self.made_again = 0
        """Calls that lost their process to somebody else and were made again, so far."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, function: Callable[..., Any], *arguments: Any, timeout: float = math.inf) -> Future[Any]:
        """Call a function some time soon, for at most `timeout` seconds; the future cannot be cancelled.

        Where it gives no value, the future has the function's exception or one of `verl.utils.process_pool.errors`.
        A call may be made twice, where another that was sent with it hung.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def done(_: int, value: Any, error: Exception | None) -> None:
            future.set_result(value) if error is None else future.set_exception(error)

        self.enqueue(function, [arguments], done, timeout)
        return future

    def enqueue(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], done: Done, timeout: float = math.inf
    ) -> None:
        """The primitive: as many calls as there are arguments, each of which tells `done` its number and what became of
        it, as a rule from the pool's own thread.
        """
        tasks, code = [], _pickled(function)
        for number, arguments in enumerate(calls):
            try:
                tasks.append(Task(code, *_pickled_arguments(arguments), timeout, done, number))
            except CannotSend as error:
                done(number, None, CannotSend(f"got what cannot be sent to another process: {error}"))
        if tasks:
            with self._lock:
                if self._thread is None:
                    self._start()
                self._waiting.extend(tasks)
            self._wake()

    def close(self) -> None:
        """Kill every process; calls still waiting are a PoolClosed. The pool may be used again."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._closing = True
        self._wake()
        thread.join()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- starting and stopping

    def _start(self) -> None:
        self._closing = False
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._start_server()
        self._thread = threading.Thread(target=self._run, name="process-pool", daemon=True)
        self._thread.start()

    def _start_server(self) -> None:
        for last in (False,) * (_MOST_LOST - 1) + (True,):
            try:
                self._server = ForkServer(self._initializer, self._memory_limit, self._max_growth)
                break
            except EOFError as error:
                if last:
                    raise InitializerError(f"it was lost {_MOST_LOST} times as it started: {error}") from error
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._server.control, selectors.EVENT_READ)

    def _wake(self) -> None:
        # Full means that a wake-up is already on its way; closed, that nobody is left to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._ringer.send(b"\0")

    def _run(self) -> None:
        reason = "the process pool broke"
        try:
            while not self._closing:
                try:
                    self._turn()
                except (OSError, EOFError) as error:
                    reason = f"the process that starts workers is gone ({error})"
                    self._replace_server(reason)
            reason = "the process pool was closed"
        except (OSError, EOFError, InitializerError) as error:
            logger.error("%s, and cannot be started again: %s", reason, error)
        finally:
            self._stop(reason)

    def _turn(self) -> None:
        self._deal()
        self._let_answers_pile_up()
        for ready, _ in self._selector.select(self._seconds_to_next_event()):
            self._listen(ready)
        self._check_clocks()

    def _replace_server(self, reason: str) -> None:
        """Its workers are gone with it. Calls that ran go to others, as those do that were sent with them."""
        self._servers_lost += 1
        if self._servers_lost > _MOST_LOST:
            raise EOFError(f"it was lost {self._servers_lost} times without an answer in between")
        logger.warning("%s: another one is started, and its calls are made again.", reason)
        self._end_processes()
        for worker in self._workers.values():
            if worker.tasks:
                self._make_again(worker.tasks.popleft(), "lost its process with the one that starts workers")
            self._give_back(worker, keep=0)
        self._workers.clear()
        self._start_server()

    def _end_processes(self) -> None:
        self._selector.close()
        self._server.close()
        for worker in self._workers.values():
            worker.link.close()

    def _stop(self, reason: str) -> None:
        with self._lock:
            if self._thread is threading.current_thread():  # not asked to: the next call starts anew
                self._thread = None
            abandoned = [task for worker in self._workers.values() for task in worker.tasks] + list(self._waiting)
            self._waiting.clear()
        self._end_processes()
        self._bell.close()
        self._ringer.close()
        self._workers.clear()
        for task in abandoned:
            task.tell(None, PoolClosed(reason))

    # ---------------------------------------------------------------- the dealing thread

    def _deal(self) -> None:
        """Give waiting calls to idle workers, starting those that are allowed and missing."""
        while self._waiting:
            at_work = [worker for worker in self._workers.values() if not worker.blocked]
            worker = next((worker for worker in at_work if not worker.tasks), None)
            if worker is not None and process_tree.why_not_running(worker.pid) == "stopped":
                self._kill(worker)
                continue
            if worker is None:
                if len(at_work) >= self._processes:
                    return
                worker = self._fork()
            worker.tasks.extend(
                self._waiting.popleft() for _ in range(self._pace.share(len(self._waiting), self._processes))
            )
            try:
                worker.send()
            except OSError:  # it ended before it could read: no fault of these calls, unless they are its first
                self._died(worker, to_blame=not worker.answered)
        while self._prefork and len(self._workers) < self._processes:
            self._fork()

    def _fork(self) -> Worker:
        worker = self._server.fork()
        self._workers[worker.pid] = worker
        self._selector.register(worker.link, selectors.EVENT_READ, worker)
        return worker

    def _let_answers_pile_up(self) -> None:
        """Waking up for every answer would cost more than most calls do: sleep until a worker should be done."""
        left = [len(worker.tasks) for worker in self._workers.values() if worker.tasks and not worker.blocked]
        if left and min(left) > 1:
            time.sleep(self._pace.pile(min(left)))

    def _listen(self, ready: selectors.SelectorKey) -> None:
        if ready.fileobj is self._bell:
            with contextlib.suppress(BlockingIOError):
                while self._bell.recv(4096):
                    pass
        elif ready.fileobj is self._server.control:  # answers are read where they are asked for: this is its end
            raise EOFError("its process ended")
        elif ready.data.pid in self._workers:
            self._read(ready.data)

    def _read(self, worker: Worker) -> None:
        """Take the answers that are there."""
        before, took, imported = worker.answered, 0.0, worker.importing is not None
        try:
            for letter, seconds, content in worker.receive():
                if letter == IMPORTING:  # which is not the fault of the call that runs now: its time starts anew
                    worker.begin()
                    worker.importing = bytes(content).decode()
                    imported = True
                elif letter == MODULES:
                    self._server.preload(content)
                elif letter == GROWN:
                    worker.spent = True
                elif not worker.tasks:  # an answer to nothing: something else writes to its socket
                    self._kill(worker)
                    return
                else:
                    took += seconds
                    if not self._take(worker, letter, content):
                        break
        except EOFError:
            self._died(worker)
            return
        answers = worker.answered - before
        if answers and not imported:
            self._pace.learn(took, answers)
        if answers and worker.pid in self._workers:
            worker.begin()
            # One that comes back from waiting may find its place taken.
            if not worker.tasks and sum(not other.blocked for other in self._workers.values()) > self._processes:
                self._kill(worker)

    def _take(self, worker: Worker, letter: bytes, content: memoryview) -> bool:
        """Deliver one answer; False: the worker is of no further use."""
        task = worker.tasks.popleft()
        # Perhaps what earlier calls left behind in memory is to blame: a second chance, in a fresh process.
        if letter == MEMORY and worker.answered and not task.again:
            task.again = True
            worker.tasks.appendleft(task)
        else:
            task.tell(*_result(letter, content))
        worker.answered += 1
        self._servers_lost = 0
        worker.importing = None
        if letter != MEMORY and not worker.spent:
            return True
        self._kill(worker)
        return False

    def _check_clocks(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if not worker.tasks or now < self._next_event(worker):
                continue
            task = worker.tasks[0]
            self._read(worker)  # the answer may be there: this thread, too, may have been kept waiting
            if worker.pid not in self._workers or not worker.tasks or worker.tasks[0] is not task:
                continue
            soon = worker.looked_at == worker.since and now - worker.since < LOOK_SECONDS
            worker.look(now)
            if worker.stopped:
                self._make_again(worker.tasks.popleft(), "was stopped")
                self._kill(worker)
            elif now - worker.since < task.timeout:
                self._pass_on(worker, soon)
            elif not worker.excused(now, task.timeout):
                why = f", after it had to import {worker.importing}" if worker.importing else ""
                worker.tasks.popleft()
                task.tell(None, TaskTimeout(f"took longer than {task.timeout:g} s and was stopped{why}"))
                self._kill(worker)

    def _pass_on(self, worker: Worker, soon: bool) -> None:
        """It takes long. If it only waits, its place goes to another; and so does what was sent with its call, at the
        latest when others have nothing else to do.
        """
        if sum(other.blocked for other in self._workers.values()) > _MOST_BESIDE:
            worker.blocked = False
        # One that computes is soon done, or just got little of a busy processor so far, as a rule.
        if worker.blocked or not (soon or self._waiting):
            worker.spent = worker.spent or len(worker.tasks) > 1
            self._give_back(worker, keep=1)

    def _seconds_to_next_event(self) -> float | None:
        """Until some call is to be looked at or stopped; None: until a message comes."""
        events = [self._next_event(worker) for worker in self._workers.values() if worker.tasks]
        return max(0.0, min(events) - time.monotonic()) if events else None

    def _next_event(self, worker: Worker) -> float:
        return self._pace.next_look(worker.since, worker.looked_at, worker.tasks[0].timeout)

    def _died(self, worker: Worker, to_blame: bool = True) -> None:
        """A worker is gone: its running call is to blame, unless somebody else may be; the others go to another."""
        code = self._server.ending_of(worker)
        how = f"ended its process {ending_in_words(code)}"
        self._take_out(worker)
        self._server.forget(worker)
        if to_blame and worker.tasks:
            task = worker.tasks.popleft()
            if code in FROM_OUTSIDE:
                self._make_again(task, how)
            else:
                task.tell(None, ProcessDied(how))
        self._give_back(worker, keep=0)

    def _make_again(self, task: Task, how: str) -> None:
        """Its process was killed or stopped, by others as far as can be told."""
        task.lost += 1
        if task.lost < _MOST_LOST:
            self.made_again += 1
            self._waiting.appendleft(task)
        else:
            task.tell(None, ProcessDied(f"{how}, as in {task.lost - 1} processes before"))

    def _kill(self, worker: Worker) -> None:
        self._give_back(worker, keep=0)
        self._take_out(worker)
        self._server.kill(worker)

    def _give_back(self, worker: Worker, keep: int) -> None:
        while len(worker.tasks) > keep:
            self._waiting.appendleft(worker.tasks.pop())

    def _take_out(self, worker: Worker) -> None:
        self._selector.unregister(worker.link)
        del self._workers[worker.pid]


def gathered(start: Callable[[Done], None], calls: int, units: Sequence[int] | None = None) -> list[Any]:
    """Wait for so many calls that `start` begins: what they returned, or the exception itself, in order.

    Less ado per call than futures make. As they come, the results count as progress of the thread that waits: 1 for
    each, or as many as `units` says.
    """
    results: dict[int, Any] = {}
    total = calls if units is None else sum(units)
    finished = told = 0
    all_done = threading.Event()

    def done(index: int, value: Any, error: Exception | None) -> None:
        nonlocal finished
        results[index] = value if error is None else error
        finished += 1 if units is None else units[index]
        if finished == total:
            all_done.set()

    expect(total)
    start(done)
    while told < total:
        all_done.wait(_TICK_SECONDS)
        now = finished
        tick(now - told)
        told = now
    for result in results.values():
        if isinstance(result, PoolClosed):
            raise result
    return [results[index] for index in range(calls)]


def _pickled(thing: Any) -> bytes:
    if getattr(thing, "__module__", None) == "__main__":
        return portable(thing)
    try:
        return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return portable(thing)  # it cannot be found over there by its name; it travels by content


def _pickled_arguments(arguments: tuple[Any, ...]) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """The pickled arguments, and the buffers among them that are sent as they are."""
    buffers: list[pickle.PickleBuffer] = []

    def belongs_inside(buffer: pickle.PickleBuffer) -> bool:
        if isinstance(memoryview(buffer).obj, bytes | bytearray):
            buffers.append(buffer)
            return False
        return True  # arrays would arrive read-only

    try:
        return pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL, buffer_callback=belongs_inside), buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        return portable(arguments), []  # by content, as in `_pickled`


def _result(letter: bytes, content: memoryview) -> tuple[Any, Exception | None]:
    """(value, error) of an answer."""
    try:
        value = pickle.loads(content)
    except Exception as error:  # noqa: BLE001 - a class that exists only over there; becomes the call's error
        return None, CannotSend(f"returned what cannot be read here: {error}")
    if letter == RETURNED:
        return value, None
    raised, trace = value
    raised.__cause__ = RemoteTraceback(trace)
    return None, raised
