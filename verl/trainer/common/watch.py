"""HangWatch: a thread beside the trainer that knows when nothing moves any more, says who waits for whom, and ends it.

It looks at the ranks only while a phase lasts: short phases cost nothing. What is stopped or dead is said within
seconds; the run ends when a phase makes no progress for its limit (`hang_limits`).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from verl.single_controller.base.beat import RankReport
from verl.single_controller.base.errors import HangError
from verl.single_controller.base.open_calls import OpenCall, calls_so_far, open_calls
from verl.trainer.common.hang_limits import HangLimits, SlowRanks
from verl.trainer.common.hang_verdict import Verdict, behind, judge, judge_controller, judge_start, name_of, table
from verl.trainer.common.status_line import Phase, StatusLine
from verl.utils.progress import pulse_count
from verl.utils.resources import load_factor
from verl.utils.stacks import answer_stack_requests, own_stacks, show

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
# Phases that are over sooner are not looked into.
_QUIET_S = 3.0
_ANSWER_S = 1.0
# A rank costs the controller about 0.3 ms each time it is asked.
_PER_RANK_S = 0.03
# Said so early, others at half of their limit.
_TOLD_AFTER_S = {"stopped": 2.0, "traced": 2.0, "dead": 2.0, "user": 60.0}
# Seconds between two log lines about a long operation of the ranks, such as the start of their engines.
_ACTIVITY_S = 10.0
# From then on the stacks of all threads are asked for.
_SUSPECT_S = 5.0
_RAISED_S = 1.0
# Who sleeps so much longer than asked for could not run, nor could others: the machine, or the job, was suspended.
_PAUSED_S = 5.0

WAITING_METRIC = "timing_s/waiting_for_one_rank"


class HangWatch:
    """While inside, the thread that entered is watched. May be entered again and again."""

    def __init__(
        self, status: StatusLine, timeout: float | None, stuck: Callable[[HangError], None] | None = None
    ) -> None:
        """`stuck` is called if the controller hangs in its own code, where it cannot be told."""
        self._status, self._stuck = status, stuck
        self._limits, self._slow = HangLimits(timeout, load_factor()), SlowRanks()
        status.on_phase_end = self._limits.took
        self._reports: Any = None
        self._thread = 0
        self.seconds = 0.0
        """Processor time that watching has taken so far."""
        self._started(time.monotonic())

    def __enter__(self) -> HangWatch:
        answer_stack_requests()
        self._thread = threading.get_ident()
        self._started(time.monotonic())
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, args=(self._over,), name="hang-watch", daemon=True)
        self._watching.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()

    def step_done(self, seconds: float) -> dict[str, float]:
        """Metrics of a step that took so long; says which rank has been slow in several of them."""
        waited, rank = self._slow.step_done(seconds)
        if rank is not None:
            logger.warning("%s is slow: in each of the last steps the others waited for it, now %.0f s", rank, waited)
        return {WAITING_METRIC: waited}

    # ---------------------------------------------------------------- the thread

    def _started(self, now: float) -> None:
        self._pulse: Any = None
        self._units: Any = None
        self._quiet_since = self._still_since = self._next_look = now
        self._looked: float | None = None
        self._standstill_since: float | None = None
        self._told: set[str] = set()
        self._activity_logged = -math.inf
        self._status.activity = None

    def _watch(self, over: threading.Event) -> None:
        before, slept, failures = self.seconds, time.monotonic(), set[str]()
        while not over.wait(_LOOK_S):
            now = time.monotonic()
            if now - slept > _LOOK_S + _PAUSED_S:
                self._started(now)
            try:
                if self._look(now):
                    return
            except Exception as error:  # noqa: BLE001 - said once; what is looked at may end meanwhile
                if not over.is_set() and repr(error) not in failures:
                    failures.add(repr(error))
                    logger.warning("the watch for hangs could not look at the run: %r", error)
            self.seconds = before + time.thread_time()
            slept = time.monotonic()

    def _look(self, now: float) -> bool:
        """Whether this was the end of it."""
        phase = self._status.now
        pulse = (phase, self._status.step, calls_so_far())
        if pulse != self._pulse:
            self._goes_on(phase)
            self._started(now)
            self._pulse = pulse
        if now - self._quiet_since < _QUIET_S or now < self._next_look:
            return False
        calls = self._calls()
        reports = self._ask(calls)
        self._next_look = time.monotonic() + _LOOK_S + _PER_RANK_S * len(reports)
        units = [(report.rank, report.beat.method, report.beat.done) for report in reports]
        units.append((-1, None, phase.progress.done + pulse_count()))  # the controller's own
        if units != self._units:
            self._units, self._still_since = units, now
            if self._standstill_since is None:
                self._goes_on(phase)
        self._report_activity(reports, now)
        verdict = self._judge(calls, reports)
        return self._weigh(phase, verdict, calls, reports, now)

    def _report_activity(self, reports: Sequence[RankReport], now: float) -> None:
        """Show the long operation of the first rank that has one, and log it every `_ACTIVITY_S` seconds."""
        active = [(report, report.beat.activity) for report in reports if report.beat.activity is not None]
        self._status.activity = active[0][1].label if active else None
        if active and now - self._activity_logged >= _ACTIVITY_S:
            self._activity_logged = now
            report, activity = active[0]
            others = f" (and {len(active) - 1} more)" if len(active) > 1 else ""
            logger.info("rank %d of %s%s is %s", report.rank, report.role, others, activity)

    def _weigh(
        self, phase: Phase, verdict: Verdict, calls: list[OpenCall], reports: list[RankReport], now: float
    ) -> bool:
        if verdict.kind == "debugged":
            self._still_since = now
        stands = verdict.kind in ("stopped", "traced", "dead")
        if stands and self._standstill_since is None:
            self._standstill_since = now
        elif not stands and self._standstill_since is not None:
            self._standstill_since, self._still_since = None, now
            self._goes_on(phase)
        seconds = now - (self._still_since if self._standstill_since is None else self._standstill_since)
        limit = self._limits.limit(phase.key, verdict.kind)
        if seconds >= limit:
            return self._end(phase, verdict, calls, reports, seconds)
        if verdict.kind not in self._told and seconds >= min(_TOLD_AFTER_S.get(verdict.kind, limit), limit / 2):
            self._told.add(verdict.kind)
            said = f"{self._where(phase)} waits for {seconds:.0f} s: {verdict.sentence}"
            self._status.trouble = said
            until = "" if limit == math.inf else f" It is given up after {limit:.0f} s (trainer.hang_timeout)."
            logger.warning("%s.%s", said, until)
        return False

    def _goes_on(self, phase: Phase) -> None:
        if self._status.trouble is not None:
            logger.warning("%s goes on", self._where(phase))
            self._status.trouble = None
        self._told.clear()

    def _end(
        self, phase: Phase, verdict: Verdict, calls: list[OpenCall], reports: list[RankReport], seconds: float
    ) -> bool:
        sentence = f"{self._where(phase)} hangs for {seconds:.0f} s: {verdict.sentence}"
        groups = {(call.group.role, rank): call.group for call in calls for rank in range(call.group.world_size)}
        blamed = [(groups[report.role, report.rank], report.rank) for report in verdict.culprits]
        helpers = [report.beat.helper for report in verdict.culprits]
        if blamed and all(helper or group.expendable for helper, (group, _) in zip(helpers, blamed, strict=True)):
            logger.warning("%s. It holds nothing that training needs: killed, to be started anew.", sentence)
            self._kill(blamed, [helper[0] if helper else None for helper in helpers])
            self._started(time.monotonic())
            return False
        error = self._error(phase, sentence, verdict, calls, reports)
        self._status.trouble, self._status.hang = sentence, error
        logger.error("%s", sentence)
        for call in open_calls():  # whoever waits: what is awaited on the way out must end, too
            call.given_up = error
        time.sleep(_RAISED_S)  # a rank that is killed must not be what the call ends with
        self._kill([place for place, report in zip(blamed, verdict.culprits, strict=True) if report.state == "stopped"])
        if not calls and self._stuck is not None:
            self._stuck(error)
        return True

    def _error(
        self, phase: Phase, sentence: str, verdict: Verdict, calls: Sequence[OpenCall], reports: Sequence[RankReport]
    ) -> HangError:
        detail = f"{table(reports)}\nthe controller:\n{show(self._own_stack())}" if reports else show(self._own_stack())
        named = next(iter(verdict.culprits or verdict.waiters), None)
        if named is None:
            host = f"{socket.gethostname()} pid {os.getpid()}"
            error = HangError(sentence, "controller", 0, host, calls[0].method if calls else phase.key, detail)
        else:
            method = next(call.method for call in calls if call.group.role == named.role)
            error = HangError(sentence, named.role, named.rank, f"{named.host} pid {named.pid}", method, detail)
        error.phase, error.step = phase.key or None, self._status.step + 1
        return error

    # ---------------------------------------------------------------- what is known

    def _calls(self) -> list[OpenCall]:
        """What the watched thread waits for itself; else what others wait for, which may be what it waits for."""
        calls = open_calls()
        return [call for call in calls if call.thread == self._thread] or calls

    def _ask(self, calls: Sequence[OpenCall]) -> list[RankReport]:
        now, before, self._looked = time.monotonic(), self._looked, time.monotonic()
        reports: list[RankReport] = []
        for call in {id(call.group.processes): call for call in reversed(calls)}.values():
            if self._reports is None:
                from verl.single_controller.ray.asking import RankReports

                self._reports = RankReports()
            if not call.group.processes:
                continue
            of_group = self._reports.of(call.group, call.start, self._suspects(now), _ANSWER_S)
            if (slow := behind(of_group)) is not None and before is not None:
                self._slow.seen(name_of(slow), now - before)
            reports += of_group
        return reports

    def _suspects(self, now: float) -> bool:
        return self._standstill_since is not None or now - self._still_since >= _SUSPECT_S

    def _judge(self, calls: Sequence[OpenCall], reports: Sequence[RankReport]) -> Verdict:
        own = judge_controller(self._own_stack())
        if starting := [call.group.role for call in calls if not call.group.processes]:
            return judge_start(starting[0], self._reports.standing() if self._suspects(time.monotonic()) else None)
        if not reports or (own.kind in ("user", "debugged") and calls[0].thread != self._thread):
            return own
        return judge(reports)

    def _own_stack(self) -> Any:
        return own_stacks(self._thread).get(self._thread, ())

    def _kill(self, ranks: Sequence[tuple[Any, int]], helpers: Sequence[int | None] | None = None) -> None:
        """These ranks, or in the place of one its helper."""
        for (group, rank), helper in zip(ranks, helpers or [None] * len(ranks), strict=True):
            process = group.processes[rank]
            self._reports.kill(process if helper is None else replace(process, pid=helper))

    def _where(self, phase: Phase) -> str:
        if not self._status.total:
            return "the start of the run"
        return f"{phase.key or 'what is done between phases'} of step {self._status.step + 1}"


def raises_here() -> Callable[[HangError], None] | None:
    """For a program whose main thread trains: what is given to the result is raised there, whatever it waits for."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGRTMIN"):
        return None
    given: list[HangError] = []

    def on_signal(number: int, frame: Any) -> None:
        raise given[-1]

    number, thread = signal.SIGRTMIN + 8, threading.get_ident()
    signal.signal(number, on_signal)

    def give(error: HangError) -> None:
        given.append(error)
        signal.pthread_kill(thread, number)

    return give
