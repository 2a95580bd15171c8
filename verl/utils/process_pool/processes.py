"""ForkServer and Worker: the pool's handles on the process that forks workers, and on each of these.

The far side, with the messages between the two: `verl.utils.process_pool.fork_server`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from verl.utils import process_tree
from verl.utils.import_utils import reduce_by_source, register_user_modules_by_value
from verl.utils.process_pool.errors import CannotSend, InitializerError
from verl.utils.process_pool.fork_server import CALLS, CONTROL, ENDED, FORK, FRAME, KILLED, PRELOAD, frame

_READ_BYTES = 1 << 18
# Messages up to this size are sent at once, larger ones in their parts, without a copy.
_SMALL_MESSAGE = 1 << 18
# Only idle workers are sent to, and they read at once. One that does not is broken.
_SEND_SECONDS = 30.0
_ANSWER_SECONDS = 120.0
# So often, while an answer is awaited, a look whether the one who is to give it has been stopped.
_LOOK_SECONDS = 0.5
# Endings that others bring about, as a rule: an operator, the kernel that is out of memory, an ending session.
FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT, -signal.SIGQUIT}
_BUSY_SHARE = 0.1
_MUCH_STARVING, _MOST_STARVING = 0.05, 10.0
_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from verl.utils.process_pool.fork_server import main; main(int(sys.argv[1]))"
)


Done = Callable[[int, Any, "Exception | None"], None]
"""Is told the number of a call, what it returned, or why it did not."""


@dataclass(slots=True, eq=False)
class Task:
    """A call on its way through the pool."""

    function: bytes  # pickled
    arguments: bytes  # pickled, without `buffers`
    buffers: list[pickle.PickleBuffer]  # sent as they are: a copy of a large one holds the interpreter's lock
    timeout: float
    done: Done
    number: int
    again: bool = False  # its first try may have failed for what others did
    lost: int = 0  # processes that were killed or stopped under it

    def tell(self, value: Any, error: Exception | None) -> None:
        self.done(self.number, value, error)


class Worker:
    """One worker process: its socket, and what the pool knows of it."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self.link = link
        link.setblocking(False)
        self.tasks: deque[Task] = deque()  # sent to it and not yet answered; the first one is running
        self.since = self.looked_at = 0.0  # when that one began, as far as is known, and was last looked at
        self.answered = 0
        self.importing: str | None = None  # what the running task had it import last
        self.blocked = False  # it takes long, and uses no processor
        self.stopped = False  # it, or a process that it started, cannot run until somebody lets it
        self.spent = False  # what was sent with the running task has gone to others: it must not go on to it
        self._cpu: float | None = None
        self._starved: float | None = None
        self._began = 0.0
        self._received = bytearray()

    def send(self) -> None:
        """Have it run its tasks. OSError: it has ended, or does not read."""
        self.begin()
        calls = [(task.function, task.arguments, [buffer.raw() for buffer in task.buffers]) for task in self.tasks]
        sizes = [(len(function), len(arguments), list(map(len, buffers))) for function, arguments, buffers in calls]
        parts: list[bytes | memoryview] = [frame(CALLS, pickle.dumps(sizes))]
        for function, arguments, buffers in calls:
            parts += [function, arguments, *buffers]
        self.link.settimeout(_SEND_SECONDS)
        for part in [b"".join(parts)] if sum(map(len, parts)) <= _SMALL_MESSAGE else parts:
            self.link.sendall(part)
        self.link.setblocking(False)

    def receive(self) -> Iterator[tuple[bytes, float, memoryview]]:
        """The frames (letter, seconds, content) that are there. EOFError, after the last: it has ended."""
        ended = False
        with contextlib.suppress(BlockingIOError):
            more = True
            while more:
                try:
                    chunk = self.link.recv(_READ_BYTES)
                except ConnectionError:
                    chunk = b""
                self._received += chunk
                ended = not chunk
                more = len(chunk) == _READ_BYTES
        yield from self._frames()
        if ended:
            raise EOFError

    def _frames(self) -> Iterator[tuple[bytes, float, memoryview]]:
        """The complete frames of what was received. Contents are not copied: large ones arrive in many pieces."""
        start, received = 0, self._received
        while len(received) - start >= FRAME.size:
            letter, size, seconds = FRAME.unpack_from(received, start)
            end = start + FRAME.size + size
            if len(received) < end:
                break
            if not start:
                self._received = bytearray()
            yield letter, seconds, memoryview(received)[start + FRAME.size : end]
            start = end
        if start:
            self._received = received[start:]

    def begin(self) -> None:
        """The time of the first of its tasks starts now."""
        self.since = self.looked_at = self._began = time.monotonic()
        self.blocked, self._cpu, self._starved = False, None, process_tree.cpu_wait_seconds(self.pid)

    def look(self, now: float) -> None:
        """See whether it, and all it started, wait for something else than the processor, or were stopped."""
        states, cpu = process_tree.thread_states(self.pid), process_tree.cpu_seconds(self.pid)
        self.stopped = "T" in states
        # One that computes on a busy machine gets little of the processor, but could run at any time.
        self.blocked = bool(states) and "R" not in states
        if self.blocked and self._cpu is not None and cpu is not None:
            self.blocked = cpu - self._cpu < _BUSY_SHARE * (now - self.looked_at)
        self.looked_at, self._cpu = now, cpu

    def excused(self, now: float, timeout: float) -> bool:
        """Time in which others had the processor is not the task's, within reason; whether there was much of it."""
        before, self._starved = self._starved, process_tree.cpu_wait_seconds(self.pid)
        lost = 0.0 if before is None or self._starved is None else self._starved - before
        if lost < _MUCH_STARVING * timeout or now - self._began > _MOST_STARVING * timeout:
            return False
        self.since += lost
        self.looked_at += lost
        return True


class ForkServer:
    """Starts with the initializer done, or raises an InitializerError that says why it cannot be.

    An EOFError, here and later: somebody killed or stopped its process.
    """

    def __init__(
        self, initializer: Callable[[], object] | None, memory_limit: int | None, max_growth: int | None
    ) -> None:
        payload = portable((initializer, memory_limit, max_growth))
        self.control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(theirs.fileno()), json.dumps(_module_path())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Many workers on few cores need no threads of their own.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        theirs.close()
        self._pids: set[int] = set()
        problem = self._initialize(payload)
        self.control.settimeout(_ANSWER_SECONDS)
        if problem is not None:
            self.control.close()
            self._process.wait()
            raise InitializerError(problem)

    def fork(self) -> Worker:
        """A fresh worker, with all that calls are known to import."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [CONTROL.pack(FORK, 0)], [theirs.fileno()])
            pid = self._answer()
        self._pids.add(pid)
        return Worker(pid, ours)

    def kill(self, worker: Worker) -> None:
        """End it and all it started, now."""
        # Not over the server, which may be busy; it reaps, so the id cannot have gone to another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        self._tell(KILLED, worker.pid)
        self.forget(worker)

    def ending_of(self, worker: Worker) -> int:
        """How one that is gone ended, as in `subprocess.Popen.returncode`; what it left behind is killed."""
        self._tell(ENDED, worker.pid)
        return self._answer()

    def preload(self, names: bytes | memoryview) -> None:
        """Have it import modules (a pickled list of names), so that fresh workers need not."""
        self._tell(PRELOAD, len(names))
        self.control.sendall(names)

    def close(self) -> None:
        """End it, its workers, and what they started."""
        self.control.close()  # the sign for it
        try:
            self._process.wait(timeout=0 if process_tree.why_not_running(self._process.pid) == "stopped" else 10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.returncode:  # not in order, so its workers may still be there
            for pid in self._pids:
                process_tree.kill_tree(pid)

    def _initialize(self, payload: bytes) -> str | None:
        with Connection(os.dup(self.control.fileno())) as pipe:
            try:
                pipe.send_bytes(payload)
                while not pipe.poll(_LOOK_SECONDS):
                    self._check_not_stopped()
                return pipe.recv()
            except (EOFError, ConnectionError) as error:
                code = self._process.wait()
                if code in FROM_OUTSIDE:
                    raise EOFError(f"its process ended {ending_in_words(code)}") from error
                return f"it ended before it was ready, {ending_in_words(code)}"

    def _tell(self, order: bytes, number: int) -> None:
        self.control.sendall(CONTROL.pack(order, number))

    def forget(self, worker: Worker) -> None:
        """It has ended, and it is known how."""
        worker.link.close()
        self._pids.discard(worker.pid)

    def _answer(self) -> int:
        """EOFError: it is gone, or was stopped; TimeoutError: it hangs."""
        give_up = time.monotonic() + _ANSWER_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            while not selector.select(_LOOK_SECONDS):
                self._check_not_stopped()
                if time.monotonic() > give_up:
                    raise TimeoutError("it does not answer")
        received = self.control.recv(CONTROL.size)
        if not received:
            raise EOFError("its process ended")
        return CONTROL.unpack(received)[1]

    def _check_not_stopped(self) -> None:
        if process_tree.why_not_running(self._process.pid) == "stopped":
            os.killpg(self._process.pid, signal.SIGKILL)
            raise EOFError("its process was stopped")


def ending_in_words(code: int) -> str:
    """Of `ForkServer.ending_of`."""
    known = {number.value: number.name for number in signal.Signals}
    return f"with exit code {code}" if code >= 0 else f"by {known.get(-code, f'signal {-code}')}"


def portable(thing: Any) -> bytes:
    """A pickle that a process which starts from scratch can read: users' modules and `__main__` go by content.

    A user's function that holds what cannot travel (the client that its file opens) is read from the file's text there,
    which runs once more.
    """
    import cloudpickle

    register_user_modules_by_value()
    try:
        return cloudpickle.dumps(thing)
    except Exception as error:  # noqa: BLE001 - objects of users raise anything when they are pickled
        return _by_text(thing, error)


def _by_text(thing: Any, why_not: Exception) -> bytes:
    import cloudpickle

    class ByText(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return reduce_by_source(obj) or super().reducer_override(obj)

    written = io.BytesIO()
    try:
        ByText(written).dump(thing)
    except Exception as error:
        raise CannotSend(str(why_not)) from error
    return written.getvalue()


def _module_path() -> list[str]:
    """Where this process finds modules, the standard library first: a user's `re.py` beside the script is no `re`."""
    library = sysconfig.get_paths()["stdlib"]
    path = [os.path.abspath(entry) for entry in sys.path]
    return sorted(path, key=lambda entry: not entry.startswith(library) or "site-packages" in entry)


# A call takes long when it takes this many times what calls typically take, and not less than that.
_LONG = 20
_FIRST_GUESS_SECONDS = 0.1
_LONG_SECONDS = 0.005
# So often a call that takes long is looked at: does it compute, wait, or was it stopped.
LOOK_SECONDS, _LOOK_AT_LEAST_SECONDS = 0.25, 2.0
# Work per message: much against the time until a busy machine lets the pool send the next one.
_MESSAGE_SECONDS = 0.1
_MOST_PER_MESSAGE = 256
# How long answers may pile up before they are read: long against what reading costs.
_PILE_SECONDS = 0.005


class Pace:
    """Learns from every answer."""

    def __init__(self) -> None:
        self._typical = _FIRST_GUESS_SECONDS

    def learn(self, seconds: float, answers: int) -> None:
        """So many answers took so long together. One that takes long must not change what is taken for long."""
        most = 4 * self._typical + 0.001
        self._typical += 0.3 * (min(seconds / answers, most) - self._typical)

    def share(self, waiting: int, processes: int) -> int:
        """How many calls the next message carries: worth a message, and at the end evenly over the workers."""
        enough = min(_MOST_PER_MESSAGE, int(_MESSAGE_SECONDS / max(self._typical, 1e-9)))
        return max(1, min(enough, max(waiting // (2 * processes), enough // 16), waiting))

    def pile(self, left: int) -> float:
        """Seconds to let answers pile up where the first worker to be done has so many calls left."""
        return min(_PILE_SECONDS, left * self._typical)

    def next_look(self, since: float, looked_at: float, timeout: float) -> float:
        """When a call that began at `since`, and was last looked at then, is to be looked at or stopped."""
        seen = looked_at - since
        long = min(max(_LONG_SECONDS, _LONG * self._typical), timeout / 4)
        # Hundreds may be waiting at a time: the longer one does, the less often it is looked at.
        pause = max(LOOK_SECONDS, min(seen / 2, _LOOK_AT_LEAST_SECONDS))
        return min(looked_at + pause if seen else since + long, since + timeout)
