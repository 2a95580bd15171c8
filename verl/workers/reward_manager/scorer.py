"""ScorerPool: reward functions in processes of their own, where hanging or dying costs one sample and no more.

`submit(sample)` gives a future. One thread deals samples out to idle scorers and watches the clock: a sample that takes
long is set aside with its process, stopped, while a fresh scorer takes the place; when all others are done, those set
aside go on together, each for the rest of its time, and are then killed. So any number of hanging samples costs the
others nothing and the batch one time limit. The far side: `verl.utils.reward_score.scorer_process`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from verl.utils.import_utils import register_user_modules_by_value
from verl.utils.reward_score import registry
from verl.utils.reward_score.scorer_process import ENDED, FORK, KILL, NUMBER, attempt

# A sample takes long when it takes this many times what samples typically take, and not less than that.
_LONG = 20
_LONG_SECONDS = 0.02
_MOST_SET_ASIDE = 256
# Without other work for so long, those set aside go on.
_IDLE_SECONDS = 0.2
_MOST_PER_MESSAGE = 32
_LOW_PRIORITY = 19
_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from verl.utils.reward_score.scorer_process import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True)
class Sample:
    """One answer to score; the fields are what a reward function is called with."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """What a reward function said: its value and further fields; or why there is none (the value is then 0)."""

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class _Task:
    number: int
    arguments: dict[str, Any]
    future: Future[Score]


@dataclass
class _Scorer:
    pid: int
    pipe: Connection
    tasks: deque[_Task] = field(default_factory=deque)  # sent to it and not yet answered; the first one is running
    since: float = 0.0
    aside: bool = False
    frozen_after: float | None = None  # seconds its sample had run when it was stopped; None: it is running


class ScorerPool:
    """Up to `processes` scorers of one function, started with the first sample; 0 scores in the caller's thread.

    `compute_score(data_source, solution_str, ground_truth, extra_info)` travels by content (cloudpickle). Without
    processes there is no time limit.
    """

    def __init__(self, compute_score: Callable[..., Any], processes: int, timeout: float) -> None:
        self._compute = compute_score
        self._processes = processes
        self._timeout = timeout
        self._waiting: deque[_Task] = deque()
        self._scorers: dict[int, _Scorer] = {}
        self._submitted = 0
        self._typical_seconds = 0.02
        self._busy_at = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, sample: Sample) -> Future[Score]:
        """Score a sample some time soon. The future always gets a Score, unless the pool itself breaks or closes."""
        future: Future[Score] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        arguments = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
        if self._processes == 0:
            future.set_result(Score(*attempt(self._compute, arguments)))
            return future
        with self._lock:
            if self._thread is None:
                self._start()
            self._submitted += 1
            self._waiting.append(_Task(self._submitted, arguments, future))
        self._wake()
        return future

    def close(self) -> None:
        """Stop every process; samples still waiting are cancelled. The pool may be used again."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._closing = True
        self._wake()
        thread.join()

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return ScorerPool, (self._compute, self._processes, self._timeout)

    # ---------------------------------------------------------------- starting and stopping

    def _start(self) -> None:
        """Start the server process; raise if it cannot load the function."""
        payload = _portable(self._compute)
        self._closing = False
        self._control, theirs = socket.socketpair()
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(theirs.fileno()), json.dumps(_module_path())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Many scorers on few cores need no threads of their own.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        theirs.close()
        with Connection(os.dup(self._control.fileno())) as pipe:
            try:
                pipe.send_bytes(payload)
                problem = pipe.recv()
            except (EOFError, ConnectionError) as error:
                problem = f"it ended before it was ready ({error or 'no reason given'})"
        if problem is not None:
            self._control.close()
            self._server.wait()
            name = getattr(self._compute, "__name__", type(self._compute).__name__)
            raise ValueError(
                f"custom_reward_function: {name} cannot be loaded in a scorer process, which starts from scratch:\n"
                f"{problem}"
            )
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="scorer-pool", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        # Full means that a wake-up is already on its way; closed, that nobody is left to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._ringer.send(b"\0")

    def _run(self) -> None:
        reason = "the scorer pool broke"
        try:
            while not self._closing:
                self._deal()
                for ready, _ in self._selector.select(self._seconds_to_next_event()):
                    self._listen(ready)
                self._look_at_the_clock()
            reason = "the scorer pool was closed"
        except (OSError, EOFError) as error:
            reason = f"the process that starts scorers is gone ({error})"
        finally:
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        with self._lock:
            if self._thread is threading.current_thread():  # not asked to: the next submit starts anew
                self._thread = None
            abandoned = [task for scorer in self._scorers.values() for task in scorer.tasks] + list(self._waiting)
            self._waiting.clear()
        for scorer in self._scorers.values():
            scorer.pipe.close()
        self._selector.close()
        for end in (self._control, self._bell, self._ringer):
            end.close()
        try:
            self._server.wait(timeout=10)  # it kills its scorers and ends when the control socket closes
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        if self._server.returncode:  # it did not end in order, so its scorers are still there
            for pid in self._scorers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self._scorers.clear()
        for task in abandoned:
            if not task.future.done():
                task.future.set_exception(RuntimeError(f"reward: {reason} before the sample was scored."))

    # ---------------------------------------------------------------- the dealing thread

    def _deal(self) -> None:
        """Give waiting samples to idle scorers, starting those that are allowed and missing."""
        while self._waiting:
            at_work = [scorer for scorer in self._scorers.values() if not scorer.aside]
            idle = next((scorer for scorer in at_work if not scorer.tasks), None)
            if idle is None:
                if len(at_work) >= self._processes:
                    return
                idle = self._fork()
            # Only idle scorers are sent to: they read at once, so a send can never block on one that hangs.
            share = max(1, min(_MOST_PER_MESSAGE, len(self._waiting) // (2 * self._processes)))
            idle.tasks.extend(self._waiting.popleft() for _ in range(share))
            idle.since = time.monotonic()
            try:
                idle.pipe.send([(task.number, task.arguments) for task in idle.tasks])
            except ConnectionError:
                self._bury(idle)

    def _listen(self, ready: selectors.SelectorKey) -> None:
        if ready.fileobj is self._bell:
            with contextlib.suppress(BlockingIOError):
                while self._bell.recv(4096):
                    pass
            return
        if ready.fileobj is self._control:  # answers are read where they are asked for: this is its end
            raise EOFError("its process ended")
        scorer: _Scorer = ready.data
        if scorer.pid not in self._scorers:
            return
        if not scorer.tasks:  # an idle scorer has nothing to say: it ended
            self._bury(scorer)
            return
        try:
            while scorer.tasks and scorer.pipe.poll():
                number, fields = pickle.loads(scorer.pipe.recv_bytes())
                task = scorer.tasks.popleft()
                assert task.number == number
                task.future.set_result(Score(*fields))
                if scorer.aside:  # the samples behind this one have gone to others
                    self._remove(scorer)
                    return
                now = time.monotonic()
                self._typical_seconds += 0.05 * (now - scorer.since - self._typical_seconds)
                scorer.since = now
        except (EOFError, ConnectionError):
            self._bury(scorer)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        aside = sum(scorer.aside for scorer in self._scorers.values())
        self._freeze_or_thaw(now, room=aside < _MOST_SET_ASIDE)
        for scorer in list(self._scorers.values()):
            if not scorer.tasks or scorer.frozen_after is not None:
                continue
            if now - scorer.since >= self._timeout:
                self._fail(scorer, f"the reward function took longer than {self._timeout:g} s and was stopped")
                self._give_back(scorer, keep=0)
                self._remove(scorer)
            elif now - scorer.since >= self._long() and self._may_step_aside(scorer, aside):
                self._give_back(scorer, keep=1)
                scorer.aside = True
                aside += 1
                self._freeze(scorer, now)

    def _freeze_or_thaw(self, now: float, room: bool) -> None:
        """Those set aside stand still while there is other work, and go on when there is none or they are too many."""
        brisk = (s for s in self._scorers.values() if s.tasks and not s.aside and now - s.since < self._long())
        if self._waiting or any(brisk):
            self._busy_at = now
        idle = now - self._busy_at >= _IDLE_SECONDS
        for scorer in self._scorers.values():
            if scorer.aside and (idle or not room):
                self._thaw(scorer, now)
            elif scorer.aside and now == self._busy_at:
                self._freeze(scorer, now)

    def _freeze(self, scorer: _Scorer, now: float) -> None:
        if scorer.frozen_after is None:
            scorer.frozen_after = now - scorer.since
            with contextlib.suppress(OSError):  # it may have ended; then its pipe says so
                os.killpg(scorer.pid, signal.SIGSTOP)

    def _thaw(self, scorer: _Scorer, now: float) -> None:
        if scorer.frozen_after is not None:
            scorer.since, scorer.frozen_after = now - scorer.frozen_after, None
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, scorer.pid, _LOW_PRIORITY)
                os.killpg(scorer.pid, signal.SIGCONT)

    def _long(self) -> float:
        return max(_LONG_SECONDS, _LONG * self._typical_seconds)

    def _may_step_aside(self, scorer: _Scorer, aside: int) -> bool:
        """Whether others wait for its place, and there is room for one more beside the pool."""
        return not scorer.aside and aside < _MOST_SET_ASIDE and (len(scorer.tasks) > 1 or bool(self._waiting))

    def _seconds_to_next_event(self) -> float | None:
        """Until some sample is to be set aside or stopped; None: until a message comes."""
        running = [s for s in self._scorers.values() if s.tasks and s.frozen_after is None]
        if not running:
            frozen = any(scorer.aside for scorer in self._scorers.values())
            return _IDLE_SECONDS if frozen else None
        aside = sum(scorer.aside for scorer in self._scorers.values())
        deadlines = [
            scorer.since + (self._long() if self._may_step_aside(scorer, aside) else self._timeout)
            for scorer in running
        ]
        return max(0.0, min(deadlines) - time.monotonic())

    def _bury(self, scorer: _Scorer) -> None:
        """A scorer died: its running sample is to blame, the others go to another."""
        code = self._remove(scorer, ENDED)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._fail(scorer, f"the reward function ended its process {how}")
        self._give_back(scorer, keep=0)

    def _fail(self, scorer: _Scorer, error: str) -> None:
        if scorer.tasks:
            scorer.tasks.popleft().future.set_result(Score(0.0, {}, error))

    def _give_back(self, scorer: _Scorer, keep: int) -> None:
        while len(scorer.tasks) > keep:
            self._waiting.appendleft(scorer.tasks.pop())

    def _fork(self) -> _Scorer:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [FORK + NUMBER.pack(0)], [theirs.fileno()])
            pid = self._answer()
        scorer = _Scorer(pid, Connection(ours.detach()))
        self._scorers[pid] = scorer
        self._selector.register(scorer.pipe, selectors.EVENT_READ, scorer)
        return scorer

    def _remove(self, scorer: _Scorer, message: bytes = KILL) -> int:
        """Take a scorer out and have it killed, if it still lives; how it ended."""
        self._control.sendall(message + NUMBER.pack(scorer.pid))
        ending = self._answer()
        self._selector.unregister(scorer.pipe)
        scorer.pipe.close()
        del self._scorers[scorer.pid]
        return ending

    def _answer(self) -> int:
        received = self._control.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(received) < NUMBER.size:
            raise EOFError("its process ended")
        return NUMBER.unpack(received)[0]


def _module_path() -> list[str]:
    """Where this process finds modules, the standard library first: a user's `re.py` beside the script is no `re`."""
    library = sysconfig.get_paths()["stdlib"]
    path = [os.path.abspath(entry) for entry in sys.path]
    return sorted(path, key=lambda entry: not entry.startswith(library) or "site-packages" in entry)


def _portable(compute: Callable[..., Any]) -> bytes:
    """The function by content, with the reward functions the user registered, which the default one looks up."""
    import cloudpickle

    register_user_modules_by_value()
    inner = compute
    while isinstance(inner, functools.partial):
        inner = inner.args[0] if inner.func is registry.call_with_accepted else inner.func
    own = registry.users_own() if inner is registry.default_compute_score else {}
    try:
        return cloudpickle.dumps((compute, own))
    except (TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"custom_reward_function: it cannot travel to a scorer process ({error}). Make what it holds inside the "
            "function, or set reward_model.reward_kwargs.num_processes=0 to score in the trainer's own process."
        ) from error
