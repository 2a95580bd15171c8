"""ScorerPool: reward functions in processes of their own, where hanging or dying costs one sample and no more.

`submit(sample)` gives a future, `score(samples)` waits for all. One thread deals samples out to scorers, several per
message, and watches the clock of each sample, which runs while the sample does (not while it imports something, nor
while others have the processor). What was sent with one that takes long goes to others.

A sample that takes long and only waits (for a network, a lock, for ever) needs no processor, so a fresh scorer takes
its place beside it: any number of these, up to some hundreds, cost the batch one time limit. One that computes for ever
keeps its place until its time is up: k of them cost k × timeout / processes.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from verl.utils.progress import expect
from verl.utils.reward_score.attempt import DIED, MEMORY, TIMEOUT, attempt, invalid
from verl.utils.reward_score.scorer_process import IMPORTED
from verl.workers.reward_manager.sample import Many, One, Results, Sample, Score, Task
from verl.workers.reward_manager.scorer_server import Scorer, ScorerServer

# A sample takes long when it takes this many times what samples typically take, and not less than that.
_LONG = 20
_FIRST_GUESS_SECONDS = 0.1
_LONG_SECONDS = 0.005
# So often, at most, a sample that takes long is looked at: does it compute or wait, or has its process ended.
_LOOK_SECONDS = 0.25
_MOST_BESIDE = 256
# Work per message: much against the time until a busy machine lets the pool send the next one.
_MESSAGE_SECONDS = 0.1
_MOST_PER_MESSAGE = 256
# How long answers may pile up before they are read: long against what reading costs.
_PILE_SECONDS = 0.005


class ScorerPool:
    """Up to `processes` scorers of one function, started with the first sample; 0 scores in the caller's thread.

    `compute_score(data_source, solution_str, ground_truth, extra_info)` travels by content (cloudpickle). Each call has
    `timeout` seconds, and its process `memory_limit` bytes beyond what is loaded. Without processes there is neither.
    """

    def __init__(
        self, compute_score: Callable[..., Any], processes: int, timeout: float, memory_limit: int | None = None
    ) -> None:
        self._compute = compute_score
        self._processes = processes
        self._timeout = timeout
        self._memory_limit = memory_limit
        self._waiting: deque[Task] = deque()
        self._scorers: dict[int, Scorer] = {}
        self._typical_seconds = _FIRST_GUESS_SECONDS
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, sample: Sample) -> Future[Score]:
        """Score a sample some time soon. The future always gets a Score, unless the pool itself breaks or closes."""
        return self.submit_call(vars(sample))

    def submit_call(self, arguments: Mapping[str, Any]) -> Future[Score]:
        """The same for a function that takes other arguments."""
        future: Future[Score] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._enqueue([arguments], One(future))
        return future

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score all and wait, with less ado per sample than futures make; in order."""
        expect(len(samples))
        results = Many(len(samples))
        self._enqueue([vars(sample) for sample in samples], results)
        return results.wait()

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
        return ScorerPool, (self._compute, self._processes, self._timeout, self._memory_limit)

    # ---------------------------------------------------------------- starting and stopping

    def _enqueue(self, calls: Sequence[Mapping[str, Any]], results: Results) -> None:
        tasks = []
        for index, arguments in enumerate(calls):
            if self._processes == 0:
                results.put(index, Score(*attempt(functools.partial(self._compute, **arguments))))
                continue
            try:
                tasks.append(Task(pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL), results, index))
            except Exception as error:  # noqa: BLE001 - becomes the sample's error
                results.put(index, Score(*invalid(f"the sample cannot be sent to a scorer process: {error}")))
        if not tasks:
            return
        with self._lock:
            if self._thread is None:
                self._start()
            self._waiting.extend(tasks)
        self._wake()

    def _start(self) -> None:
        self._server = ScorerServer(self._compute, self._memory_limit)
        self._closing = False
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._server.control, selectors.EVENT_READ)
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
                self._let_answers_pile_up()
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
        self._selector.close()
        self._server.close()
        for scorer in self._scorers.values():
            scorer.link.close()
        self._bell.close()
        self._ringer.close()
        self._scorers.clear()
        for task in abandoned:
            task.results.abandon(RuntimeError(f"reward: {reason} before the sample was scored."))

    # ---------------------------------------------------------------- the dealing thread

    def _deal(self) -> None:
        """Give waiting samples to idle scorers, starting those that are allowed and missing."""
        while self._waiting:
            at_work = [scorer for scorer in self._scorers.values() if not scorer.blocked]
            scorer = next((scorer for scorer in at_work if not scorer.tasks), None)
            if scorer is None:
                if len(at_work) >= self._processes:
                    return
                scorer = self._fork()
            scorer.tasks.extend(self._waiting.popleft() for _ in range(self._share()))
            scorer.begin(time.monotonic())
            try:
                scorer.send([task.payload for task in scorer.tasks])
            except (
                OSError
            ):  # it ended before it could read, which is no fault of these samples unless they are its first
                self._bury(scorer, to_blame=not scorer.answered)

    def _share(self) -> int:
        """How many samples the next message carries: worth a message, and at the end evenly over the scorers."""
        waiting = len(self._waiting)
        enough = min(_MOST_PER_MESSAGE, int(_MESSAGE_SECONDS / max(self._typical_seconds, 1e-9)))
        return max(1, min(enough, max(waiting // (2 * self._processes), enough // 16), waiting))

    def _let_answers_pile_up(self) -> None:
        """Waking up for every answer would cost more than most functions do: sleep until a scorer should be done."""
        left = [len(scorer.tasks) for scorer in self._scorers.values() if scorer.tasks and not scorer.blocked]
        if left and min(left) > 1:
            time.sleep(min(_PILE_SECONDS, min(left) * self._typical_seconds))

    def _listen(self, ready: selectors.SelectorKey) -> None:
        if ready.fileobj is self._bell:
            with contextlib.suppress(BlockingIOError):
                while self._bell.recv(4096):
                    pass
        elif ready.fileobj is self._server.control:  # answers are read where they are asked for: this is its end
            raise EOFError("its process ended")
        elif ready.data.pid in self._scorers:
            self._read(ready.data)

    def _read(self, scorer: Scorer) -> None:
        """Take the answers that are there."""
        before, took = scorer.answered, 0.0
        try:
            for letter, seconds, content in scorer.receive():
                if letter == IMPORTED:  # which is not the fault of the sample that is scored now: its time starts anew
                    scorer.begin(time.monotonic())
                    scorer.imported += pickle.loads(content)
                elif not scorer.tasks:  # an answer to nothing: something else writes to its socket
                    self._kill(scorer)
                    return
                elif not self._take(scorer, content):
                    return
                else:
                    took += seconds
        except EOFError:
            self._bury(scorer)
            return
        answers = scorer.answered - before
        if answers:
            if scorer.imported:
                self._share_imports(scorer)
            else:
                self._learn(took / answers)
            scorer.begin(time.monotonic())
            self._send_home_if_one_too_many(scorer)

    def _take(self, scorer: Scorer, content: bytes) -> bool:
        """Deliver one answer; False: the scorer is of no further use."""
        try:
            score = Score(*pickle.loads(content))
        except Exception as error:  # noqa: BLE001 - a class that exists only over there; becomes the sample's error
            score = Score(*invalid(f"what the reward function returned cannot be read: {error}"))
        task = scorer.tasks.popleft()
        if score.kind == MEMORY:
            # Perhaps what earlier samples left behind is to blame. It gets a second chance, in a fresh process.
            if scorer.answered and not task.again:
                task.again = True
                scorer.tasks.appendleft(task)
            else:
                task.results.put(task.index, score)
            self._give_back(scorer, keep=0)
            self._kill(scorer)
            return False
        scorer.answered += 1
        task.results.put(task.index, score)
        if scorer.spent:
            self._kill(scorer)
        return not scorer.spent

    def _share_imports(self, scorer: Scorer) -> None:
        """What one scorer imported while scoring, later ones shall have from the start."""
        names, scorer.imported = scorer.imported, []
        if names:
            self._server.preload(names)

    def _learn(self, seconds: float) -> None:
        # One sample that takes long must not change what is taken for long.
        self._typical_seconds += 0.3 * (min(seconds, 4 * self._typical_seconds + 0.001) - self._typical_seconds)

    def _send_home_if_one_too_many(self, scorer: Scorer) -> None:
        """A scorer that comes back from waiting may find its place taken."""
        if not scorer.tasks and sum(not other.blocked for other in self._scorers.values()) > self._processes:
            self._kill(scorer)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for scorer in list(self._scorers.values()):
            if not scorer.tasks or now < self._next_event(scorer):
                continue
            task = scorer.tasks[0]
            self._read(scorer)  # the answer may be there: this thread, too, may have been kept waiting
            if scorer.pid not in self._scorers or not scorer.tasks or scorer.tasks[0] is not task:
                continue
            if now - scorer.since < self._timeout:
                self._look_at(scorer, now)
            elif not scorer.make_up_for_starving(now, self._timeout):
                self._give_up(scorer)

    def _look_at(self, scorer: Scorer, now: float) -> None:
        """It takes long. If it only waits, its place goes to another; and so does what was sent with its sample, at the
        latest when others have nothing else to do.
        """
        soon = scorer.looked_at == scorer.since and now - scorer.since < _LOOK_SECONDS
        if not scorer.look(now):  # it ended, and something it started still holds its socket
            self._bury(scorer)
            return
        if sum(other.blocked for other in self._scorers.values()) > _MOST_BESIDE:
            scorer.blocked = False
        # One that computes is soon done, or just got little of a busy processor so far, as a rule.
        if scorer.blocked or not (soon or self._waiting):
            scorer.spent = scorer.spent or len(scorer.tasks) > 1
            self._give_back(scorer, keep=1)

    def _give_up(self, scorer: Scorer) -> None:
        what = f", after it had to import {scorer.imported[-1]}" if scorer.imported else ""
        self._fail(scorer, f"the reward function took longer than {self._timeout:g} s and was stopped{what}", TIMEOUT)
        self._share_imports(scorer)
        self._give_back(scorer, keep=0)
        self._kill(scorer)

    def _long(self) -> float:
        return min(max(_LONG_SECONDS, _LONG * self._typical_seconds), self._timeout / 4)

    def _seconds_to_next_event(self) -> float | None:
        """Until some sample is to be looked at or stopped; None: until a message comes."""
        events = [self._next_event(scorer) for scorer in self._scorers.values() if scorer.tasks]
        return max(0.0, min(events) - time.monotonic()) if events else None

    def _next_event(self, scorer: Scorer) -> float:
        seen = scorer.looked_at - scorer.since
        # Hundreds may be waiting at a time: the longer one does, the less often it is looked at.
        next_look = scorer.looked_at + max(_LOOK_SECONDS, seen / 2) if seen else scorer.since + self._long()
        return min(next_look, scorer.since + self._timeout)

    def _bury(self, scorer: Scorer, to_blame: bool = True) -> None:
        """A scorer died: its running sample is to blame, the others go to another."""
        self._take_out(scorer)
        code = self._server.ending_of(scorer)
        if to_blame:
            self._fail(scorer, f"the reward function ended its process {_in_words(code)}", DIED)
        self._give_back(scorer, keep=0)

    def _fail(self, scorer: Scorer, error: str, kind: str) -> None:
        if scorer.tasks:
            task = scorer.tasks.popleft()
            task.results.put(task.index, Score(0.0, {}, error, kind))

    def _give_back(self, scorer: Scorer, keep: int) -> None:
        while len(scorer.tasks) > keep:
            self._waiting.appendleft(scorer.tasks.pop())

    def _fork(self) -> Scorer:
        scorer = self._server.fork()
        self._scorers[scorer.pid] = scorer
        self._selector.register(scorer.link, selectors.EVENT_READ, scorer)
        return scorer

    def _kill(self, scorer: Scorer) -> None:
        self._take_out(scorer)
        self._server.kill(scorer)

    def _take_out(self, scorer: Scorer) -> None:
        self._selector.unregister(scorer.link)
        del self._scorers[scorer.pid]


def _in_words(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"by {known.get(-code, f'signal {-code}')}"
