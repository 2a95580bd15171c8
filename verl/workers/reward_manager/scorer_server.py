"""ScorerServer and Scorer: the pool's handles on the process that forks scorers, and on each of these.

The far side, with the messages between the two: `verl.utils.reward_score.scorer_process`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from verl.utils import process_tree
from verl.utils.import_utils import register_user_modules_by_value
from verl.utils.reward_score import registry
from verl.utils.reward_score.scorer_process import CONTROL, ENDED, FORK, FRAME, KILLED, PRELOAD, SCORE
from verl.workers.reward_manager.sample import Task

_READ_BYTES = 1 << 18
# Only idle scorers are sent to, and they read at once. One that does not is broken.
_SEND_SECONDS = 30.0
_ANSWER_SECONDS = 120.0
_BUSY_SHARE = 0.1
_MUCH_STARVING, _MOST_STARVING = 0.05, 10.0
_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from verl.utils.reward_score.scorer_process import main; main(int(sys.argv[1]))"
)


class Scorer:
    """One scorer process: its socket, and what the pool knows of it."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self.link = link
        link.setblocking(False)
        self.tasks: deque[Task] = deque()  # sent to it and not yet answered; the first one is running
        self.since = 0.0  # when that one began, as far as is known
        self.answered = 0
        self.imported: list[str] = []  # what the running sample had it import
        self.blocked = False  # it takes long, and uses no processor
        self.spent = False  # what was sent with the running sample has gone to others: it must not go on to it
        self.looked_at = 0.0
        self._cpu: float | None = None
        self._scheduled: tuple[float, float] | None = None
        self._scheduled_at = self._began = 0.0
        self._received = bytearray()

    def send(self, payloads: Sequence[bytes]) -> None:
        """Arguments to score, each pickled. OSError: it has ended, or does not read."""
        body = pickle.dumps(payloads, pickle.HIGHEST_PROTOCOL)
        self.link.settimeout(_SEND_SECONDS)
        self.link.sendall(FRAME.pack(SCORE, len(body), 0.0) + body)
        self.link.setblocking(False)

    def receive(self) -> Iterator[tuple[bytes, float, bytes]]:
        """The frames (letter, seconds, content) that are there. EOFError, after the last: it has ended."""
        ended = False
        try:
            more = True
            while more:
                chunk = self.link.recv(_READ_BYTES)
                self._received += chunk
                ended = not chunk
                more = len(chunk) == _READ_BYTES
        except BlockingIOError:
            pass
        except ConnectionError:
            ended = True
        yield from self._frames()
        if ended:
            raise EOFError

    def look(self, now: float) -> bool:
        """See whether it, and all it started, wait for something else than the processor; False: it has ended."""
        states = process_tree.states(self.pid)
        if states[:1] == ["Z"]:
            return False
        cpu = process_tree.cpu_seconds(self.pid)
        # One that computes on a busy machine gets little of the processor, but could run at any time.
        idle = bool(states) and "R" not in states
        if idle and self._cpu is not None and cpu is not None:
            idle = cpu - self._cpu < _BUSY_SHARE * (now - self.looked_at)
        self.blocked = idle
        self.looked_at, self._cpu = now, cpu
        return True

    def begin(self, now: float) -> None:
        """The time of the first of its tasks starts now."""
        self.since = self.looked_at = self._began = self._scheduled_at = now
        self.blocked, self._cpu, self._scheduled = False, None, process_tree.scheduled(self.pid)

    def make_up_for_starving(self, now: float, timeout: float) -> bool:
        """Time in which others had the processor is not the sample's, within reason; whether there was much of it."""
        before, window = self._scheduled, now - self._scheduled_at
        self._scheduled, self._scheduled_at = process_tree.scheduled(self.pid), now
        if before is None or self._scheduled is None:
            return False
        ran, waited = (after - earlier for after, earlier in zip(self._scheduled, before, strict=True))
        # One that could run now has been waiting since it last ran, which is not in the books yet.
        lost = window - ran if process_tree.states(self.pid)[:1] == ["R"] else waited
        if lost < _MUCH_STARVING * timeout or now - self._began > _MOST_STARVING * timeout:
            return False
        self.since += lost
        self.looked_at += lost
        return True

    def _frames(self) -> Iterator[tuple[bytes, float, bytes]]:
        received, start = bytes(self._received), 0
        while len(received) - start >= FRAME.size:
            letter, size, seconds = FRAME.unpack_from(received, start)
            end = start + FRAME.size + size
            if len(received) < end:
                break
            yield letter, seconds, received[start + FRAME.size : end]
            start = end
        self._received = bytearray(received[start:])


class ScorerServer:
    """Starts with the function loaded, or raises a ValueError that says why it cannot be."""

    def __init__(self, compute_score: Callable[..., Any], memory_limit: int | None) -> None:
        payload = _portable(compute_score, memory_limit)
        self.control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(theirs.fileno()), json.dumps(_module_path())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Many scorers on few cores need no threads of their own.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        theirs.close()
        self._pids: set[int] = set()
        problem = self._load(payload)
        self.control.settimeout(_ANSWER_SECONDS)
        if problem is not None:
            self.control.close()
            self._process.wait()
            name = getattr(compute_score, "__name__", type(compute_score).__name__)
            raise ValueError(
                f"custom_reward_function: {name} cannot be loaded in a scorer process, which starts from scratch:\n"
                f"{problem}"
            )

    def fork(self) -> Scorer:
        """A fresh scorer, with all that the function is known to import."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [CONTROL.pack(FORK, 0)], [theirs.fileno()])
            pid = self._answer()
        self._pids.add(pid)
        return Scorer(pid, ours)

    def kill(self, scorer: Scorer) -> None:
        """End it and all it started, now."""
        # Not over the server, which may be busy; it reaps, so the id cannot have gone to another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(scorer.pid, signal.SIGKILL)
        self._tell(KILLED, scorer.pid)
        self._forget(scorer)

    def ending_of(self, scorer: Scorer) -> int:
        """How one that ended by itself did so (as in `subprocess.Popen.returncode`); what it left behind is killed."""
        self._tell(ENDED, scorer.pid)
        self._forget(scorer)
        return self._answer()

    def preload(self, names: Sequence[str]) -> None:
        """Have it import modules, so that fresh scorers need not."""
        content = pickle.dumps(names)
        self._tell(PRELOAD, len(content))
        self.control.sendall(content)

    def close(self) -> None:
        """End it, its scorers, and what they started."""
        self.control.close()  # the sign for it
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.returncode:  # not in order, so its scorers may still be there
            for pid in self._pids:
                process_tree.kill_family(pid)

    def _load(self, payload: bytes) -> str | None:
        with Connection(os.dup(self.control.fileno())) as pipe:
            try:
                pipe.send_bytes(payload)
                return pipe.recv()
            except (EOFError, ConnectionError) as error:
                return f"it ended before it was ready ({error or 'no reason given'})"

    def _tell(self, order: bytes, number: int) -> None:
        self.control.sendall(CONTROL.pack(order, number))

    def _forget(self, scorer: Scorer) -> None:
        scorer.link.close()
        self._pids.discard(scorer.pid)

    def _answer(self) -> int:
        received = b""
        while len(received) < CONTROL.size:
            part = self.control.recv(CONTROL.size - len(received))
            if not part:
                raise EOFError("its process ended")
            received += part
        return CONTROL.unpack(received)[1]


def _module_path() -> list[str]:
    """Where this process finds modules, the standard library first: a user's `re.py` beside the script is no `re`."""
    library = sysconfig.get_paths()["stdlib"]
    path = [os.path.abspath(entry) for entry in sys.path]
    return sorted(path, key=lambda entry: not entry.startswith(library) or "site-packages" in entry)


def _portable(compute: Callable[..., Any], memory_limit: int | None) -> bytes:
    """The function by content, with the reward functions the user registered, which the default one looks up."""
    import cloudpickle

    register_user_modules_by_value()
    inner = compute
    while isinstance(inner, functools.partial):
        inner = inner.args[0] if inner.func is registry.call_with_accepted else inner.func
    own = registry.users_own() if inner is registry.default_compute_score else {}
    try:
        return cloudpickle.dumps((compute, own, memory_limit))
    except (TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"custom_reward_function: it cannot travel to a scorer process ({error}). Make what it holds inside the "
            "function, or set reward_model.reward_kwargs.num_processes=0 to score in the trainer's own process."
        ) from error
