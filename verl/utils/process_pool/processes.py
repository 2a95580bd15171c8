"""ForkServer and WorkerProcess: the pool's handles of the fork server and of its workers.

The code that runs in these processes, and the messages: `verl.utils.process_pool.fork_server`.
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
from verl.utils.process_pool.fork_server import (
    CALLS,
    CONTROL,
    ENDED,
    FORK,
    FRAME,
    KILLED,
    PRELOAD,
    CannotSend,
    InitializerError,
)

# Maximum size of one read from the socket of a worker.
_READ_BYTES = 1 << 18
# Messages up to this size are joined and sent at once, larger ones in parts, without a copy.
_SMALL_MESSAGE_BYTES = 1 << 18
# Time limit for sending calls. They are only sent to idle workers, which read immediately; a worker that does not is
# broken.
_SEND_SECONDS = 30.0
# Time limit for a reply of the fork server.
_REPLY_SECONDS = 120.0
# Interval at which, while a reply is pending, the fork server is checked for having been stopped (SIGSTOP).
_STOP_CHECK_SECONDS = 0.5
# Signals that usually come from outside: from an operator, the kernel's OOM killer, the end of a session.
EXTERNAL_SIGNALS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT, -signal.SIGQUIT}
# A slow call that uses less than this share of a core is blocked: it waits for something.
_BUSY_CPU_SHARE = 0.1
# The time limit of a call is extended by the time in which its worker waited for a CPU, if that is at least this share
# of the limit, and at most to this multiple of the limit.
_MIN_WAIT_SHARE = 0.05
_MAX_WAIT_FACTOR = 10.0
# Program of the fork server; arguments: file descriptor of its socket, sys.path as JSON.
_SERVER_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from verl.utils.process_pool.fork_server import main; main(int(sys.argv[1]))"
)

DoneCallback = Callable[[int, Any, "Exception | None"], None]
"""Called with the number of a call, its value, and its error or None."""


@dataclass(slots=True, eq=False)
class Task:
    """A submitted function call."""

    function: bytes  # pickled
    arguments: bytes  # pickled, without `buffers`
    buffers: list[pickle.PickleBuffer]  # sent without a copy: copying a large one would hold the GIL
    timeout_s: float
    on_done: DoneCallback
    number: int  # passed to `on_done`
    retried_for_memory: bool = False  # ran out of memory once, in a process that earlier calls had used
    num_losses: int = 0  # how many processes of this call were killed or stopped

    def finish(self, value: Any, error: Exception | None) -> None:
        self.on_done(self.number, value, error)


class WorkerProcess:
    """Handle of one worker process: its socket, its calls and the start time of the running call."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self.link = link
        link.setblocking(False)
        self.tasks: deque[Task] = deque()  # sent to it and not finished; the first one is running
        self.started_at = self.checked_at = 0.0  # when that one started, and when its state was last checked
        self.completed = 0
        self.importing: str | None = None  # module that the running call imported last
        self.blocked = False  # its call is slow and uses no CPU
        self.stopped = False  # it, or a child process, was stopped (SIGSTOP)
        self.retiring = False  # kill it after the running call: its other calls were requeued, or it has grown
        self._cpu: float | None = None
        self._cpu_wait: float | None = None
        self._clock_start = 0.0
        self._received = bytearray()

    def send(self) -> None:
        """Send `tasks` to the process. Raises OSError if it has ended or does not read."""
        self.start_clock()
        calls = [(task.function, task.arguments, [buffer.raw() for buffer in task.buffers]) for task in self.tasks]
        sizes = [(len(function), len(arguments), list(map(len, buffers))) for function, arguments, buffers in calls]
        header = pickle.dumps(sizes)
        parts: list[bytes | memoryview] = [FRAME.pack(CALLS, len(header), 0.0), header]
        for function, arguments, buffers in calls:
            parts += [function, arguments, *buffers]
        self.link.settimeout(_SEND_SECONDS)
        for part in [b"".join(parts)] if sum(map(len, parts)) <= _SMALL_MESSAGE_BYTES else parts:
            self.link.sendall(part)
        self.link.setblocking(False)

    def receive(self) -> Iterator[tuple[bytes, float, memoryview]]:
        """Yield the frames (kind, seconds, content) that have arrived; EOFError after the last one if the process
        has ended."""
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
        """Yield the complete frames. Contents are not copied: large ones arrive in many pieces."""
        start, received = 0, self._received
        while len(received) - start >= FRAME.size:
            kind, size, seconds = FRAME.unpack_from(received, start)
            end = start + FRAME.size + size
            if len(received) < end:
                break
            if not start:
                self._received = bytearray()
            yield kind, seconds, memoryview(received)[start + FRAME.size : end]
            start = end
        if start:
            self._received = received[start:]

    def start_clock(self) -> None:
        """Start the clock of its first task."""
        self.started_at = self.checked_at = self._clock_start = time.monotonic()
        self.blocked, self._cpu, self._cpu_wait = False, None, process_tree.cpu_wait_seconds(self.pid)

    def check_state(self, now: float) -> None:
        """Update `blocked` and `stopped` from the states of all threads of the worker and its children."""
        states, cpu = process_tree.thread_states(self.pid), process_tree.cpu_seconds(self.pid)
        self.stopped = "T" in states
        # On a busy machine a process that computes gets little CPU time, but its threads are runnable.
        self.blocked = bool(states) and "R" not in states
        if self.blocked and self._cpu is not None and cpu is not None:
            self.blocked = cpu - self._cpu < _BUSY_CPU_SHARE * (now - self.checked_at)
        self.checked_at, self._cpu = now, cpu

    def extend_deadline(self, now: float, timeout_s: float) -> bool:
        """Extend the time limit by the time in which the worker waited for a CPU. Returns whether it was extended.

        At most to `_MAX_WAIT_FACTOR` times the limit, and only if the wait was a relevant part of it.
        """
        before, self._cpu_wait = self._cpu_wait, process_tree.cpu_wait_seconds(self.pid)
        lost = 0.0 if before is None or self._cpu_wait is None else self._cpu_wait - before
        if lost < _MIN_WAIT_SHARE * timeout_s or now - self._clock_start > _MAX_WAIT_FACTOR * timeout_s:
            return False
        self.started_at += lost
        self.checked_at += lost
        return True


class ForkServer:
    """Handle of the fork server. The constructor waits for the initializer and raises InitializerError if it fails.

    Methods other than `close` and `discard` raise EOFError or OSError if the server has ended, EOFError if it was
    stopped (SIGSTOP), and TimeoutError (an OSError) if it does not reply.
    """

    def __init__(
        self, initializer: Callable[[], object] | None, memory_limit: int | None, max_growth: int | None
    ) -> None:
        payload = portable_pickle((initializer, memory_limit, max_growth))
        self.control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER_PROGRAM, str(theirs.fileno()), json.dumps(_module_path())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # There are usually more workers than cores.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        theirs.close()
        self._pids: set[int] = set()
        try:
            self._initialize(payload)
        except BaseException:
            self.control.close()
            self._kill_server()
            raise
        self.control.settimeout(_REPLY_SECONDS)

    def fork(self) -> WorkerProcess:
        """Fork a worker; it inherits the preloaded modules."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [CONTROL.pack(FORK, 0)], [theirs.fileno()])
            pid = self._reply()
        self._pids.add(pid)
        return WorkerProcess(pid, ours)

    def kill(self, worker: WorkerProcess) -> None:
        """Kill a worker and all its child processes."""
        # Directly: the server may be busy. Only the server reaps it, so the process id cannot have been reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        self._send_command(KILLED, worker.pid)
        self.discard(worker)

    def exit_code(self, worker: WorkerProcess) -> int:
        """Exit code of a worker that has ended (as `subprocess.Popen.returncode`); its child processes are killed."""
        self._send_command(ENDED, worker.pid)
        return self._reply()

    def preload(self, names: bytes | memoryview) -> None:
        """Import modules (a pickled list of names) in the server, so that new workers have them."""
        self._send_command(PRELOAD, len(names))
        self.control.sendall(names)

    def close(self) -> None:
        """End the server, its workers and their child processes."""
        self.control.close()  # the server exits when it is closed
        try:
            self._process.wait(timeout=0 if process_tree.why_not_running(self._process.pid) == "stopped" else 10)
        except subprocess.TimeoutExpired:
            self._kill_server()
        if self._process.returncode:  # it failed, so its workers may still run
            for pid in self._pids:
                process_tree.kill_tree(pid)

    def _initialize(self, payload: bytes) -> None:
        with Connection(os.dup(self.control.fileno())) as pipe:
            try:
                pipe.send_bytes(payload)
                while not pipe.poll(_STOP_CHECK_SECONDS):
                    self._check_not_stopped()
                problem = pipe.recv()
            except (EOFError, ConnectionError) as error:
                code = self._process.wait()
                if code in EXTERNAL_SIGNALS:
                    raise EOFError(f"the fork server {process_tree.describe_exit(code)}") from error
                problem = f"the fork server {process_tree.describe_exit(code)} during start-up"
        if problem is not None:
            self._process.wait()
            raise InitializerError(problem)

    def _send_command(self, command: bytes, number: int) -> None:
        self.control.sendall(CONTROL.pack(command, number))

    def discard(self, worker: WorkerProcess) -> None:
        """Close the socket of a worker that has ended."""
        worker.link.close()
        self._pids.discard(worker.pid)

    def _reply(self) -> int:
        """Read the reply to a request. EOFError: the server has ended or was stopped; TimeoutError: it hangs."""
        deadline = time.monotonic() + _REPLY_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            while not selector.select(_STOP_CHECK_SECONDS):
                self._check_not_stopped()
                if time.monotonic() > deadline:
                    raise TimeoutError("the fork server does not reply")
        received = self.control.recv(CONTROL.size)
        if not received:
            raise EOFError("the fork server ended")
        return CONTROL.unpack(received)[1]

    def _check_not_stopped(self) -> None:
        if process_tree.why_not_running(self._process.pid) == "stopped":
            self._kill_server()
            raise EOFError("the fork server was stopped (SIGSTOP)")

    def _kill_server(self) -> None:
        """Kill the fork server, if it has not ended, and reap it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def portable_pickle(value: Any) -> bytes:
    """Pickle a value for a new process: users' modules and `__main__` are pickled by value.

    A user's function that refers to an object that cannot be pickled (such as a client that its file opens) is loaded
    from its source file there, which runs the file again.
    """
    import cloudpickle

    register_user_modules_by_value()
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - objects of users raise anything when they are pickled
        return _pickle_by_source(value, error)


def _pickle_by_source(value: Any, cause: Exception) -> bytes:
    import cloudpickle

    class SourcePickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return reduce_by_source(obj) or super().reducer_override(obj)

    written = io.BytesIO()
    try:
        SourcePickler(written).dump(value)
    except Exception as error:
        raise CannotSend(str(cause)) from error
    return written.getvalue()


def _module_path() -> list[str]:
    """`sys.path` with the standard library first, so that a user's `re.py` next to the script does not replace `re`."""
    library = sysconfig.get_paths()["stdlib"]
    path = [os.path.abspath(entry) for entry in sys.path]
    return sorted(path, key=lambda entry: not entry.startswith(library) or "site-packages" in entry)


# A call is slow if it takes this many times the typical duration, and at least _SLOW_SECONDS.
_SLOW_FACTOR = 20
_INITIAL_ESTIMATE_SECONDS = 0.1
_SLOW_SECONDS = 0.005
# Intervals at which a slow call is checked: does it compute, does it wait, was it stopped.
CHECK_SECONDS, _MAX_CHECK_SECONDS = 0.25, 2.0
# Work per message: long compared to the time until a busy machine lets the pool send the next one.
_MESSAGE_SECONDS = 0.1
_MAX_CALLS_PER_MESSAGE = 256
# Time until results are read: long compared to the cost of reading.
_RESULT_WAIT_SECONDS = 0.005


class CallPacing:
    """Number of calls per message and intervals of checks, from the typical duration of a call."""

    def __init__(self) -> None:
        self._typical = _INITIAL_ESTIMATE_SECONDS

    def update(self, seconds: float, results: int) -> None:
        """Record that `results` calls took `seconds` together. One slow call changes the estimate little."""
        highest = 4 * self._typical + 0.001
        self._typical += 0.3 * (min(seconds / results, highest) - self._typical)

    def calls_per_message(self, waiting: int, processes: int) -> int:
        """Number of calls in the next message to a worker, if `waiting` calls are queued for `processes` workers.

        About `_MESSAGE_SECONDS` of work, and less when the queue is short, so that all workers finish together.
        """
        target = min(_MAX_CALLS_PER_MESSAGE, int(_MESSAGE_SECONDS / max(self._typical, 1e-9)))
        return max(1, min(target, max(waiting // (2 * processes), target // 16), waiting))

    def wait_seconds(self, remaining: int) -> float:
        """Seconds to wait for results if the first worker to finish has `remaining` calls."""
        return min(_RESULT_WAIT_SECONDS, remaining * self._typical)

    def next_check(self, started_at: float, checked_at: float, timeout_s: float) -> float:
        """Time at which a call that was last checked at `checked_at` must be checked again or stopped."""
        elapsed = checked_at - started_at
        slow_after = min(max(_SLOW_SECONDS, _SLOW_FACTOR * self._typical), timeout_s / 4)
        # Hundreds of calls may wait at a time: the longer a call waits, the less often it is checked.
        interval = max(CHECK_SECONDS, min(elapsed / 2, _MAX_CHECK_SECONDS))
        return min(checked_at + interval if elapsed else started_at + slow_after, started_at + timeout_s)
