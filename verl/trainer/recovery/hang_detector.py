"""HangDetector: a thread that detects when a run makes no progress, names the rank that the others wait for, and ends
the run.

It polls the ranks only in phases of more than a few seconds. Stopped or dead processes are reported within seconds; the
run ends when a phase makes no progress for its time limit (`HangLimits`).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from verl.single_controller.base.heartbeat import OpenCall, RankReport, call_count, open_calls
from verl.single_controller.base.worker_group import HangError
from verl.trainer.common.run_status import Phase, RunStatus
from verl.trainer.recovery.hang_diagnosis import (
    HangDiagnosis,
    diagnose_controller,
    diagnose_hang,
    diagnose_start,
    rank_name,
    report_table,
    slowest_rank,
)
from verl.utils.progress import pulse_count
from verl.utils.resources import load_factor
from verl.utils.stacks import enable_stack_dumps, own_stacks, show

logger = logging.getLogger(__name__)

WAITING_METRIC = "timing_s/waiting_for_one_rank"
# Prefix of the names of phases that restart processes and load models.
RESTART_PHASE = "restart of "

POLL_S = 1.0
# Ranks are polled only if a phase has made no progress for this time.
QUIET_S = 3.0
_ANSWER_TIMEOUT_S = 1.0
# A poll of one rank costs the controller about 0.3 ms: the interval grows with the number of ranks.
_POLL_S_PER_RANK = 0.03
# Time after which a problem of this kind is logged; other kinds are logged after half of their time limit.
_WARN_AFTER_S = {"stopped": 2.0, "traced": 2.0, "dead": 2.0, "user": 60.0}
# Seconds between two log lines about a long operation of the ranks, such as the start of their engines.
_ACTIVITY_LOG_S = 10.0
# Time without progress after which the stacks of all threads are requested.
_SUSPECT_S = 5.0
# Time for the callers to raise the HangError. After that ranks are killed, which fails calls with other errors.
RAISE_S = 1.0
# If a sleep takes this much longer than requested, the machine or the job was suspended.
SUSPENDED_S = 5.0

# No hang is shorter: compilation for a new shape, a slow disk or a validation of long responses may take minutes.
_MIN_LIMIT_S = 300.0
# Limit of a phase that has not been completed yet in this run.
_UNKNOWN_PHASE_S = 1800.0
# Later limit of a phase: this multiple of the longest of its recent durations.
_LIMIT_FACTOR = 5.0
_RECENT_PHASES = 10
# Stopped and dead processes do not recover by themselves.
_STANDSTILL_S = 60.0
# A rank is slow if the others wait for it for more than this share of a step, in this many consecutive steps.
_SLOW_SHARE = 0.25
_SLOW_STEPS = 3


class HangDetector:
    """Context manager that monitors the thread that has entered it. May be entered again after its exit."""

    def __init__(
        self,
        status: RunStatus,
        timeout: float | None,
        raise_in_controller: Callable[[HangError], None] | None = None,
    ) -> None:
        """`raise_in_controller` is called if the controller hangs outside of worker group calls."""
        self._status, self._raise_in_controller = status, raise_in_controller
        self._limits, self._slow = HangLimits(timeout, load_factor()), SlowRanks()
        status.on_phase_end = self._limits.record_phase
        self._reports: Any = None
        self._watched_thread = 0
        self.seconds = 0.0
        """Processor time that the detector has used so far."""
        self._reset(time.monotonic())

    def __enter__(self) -> HangDetector:
        enable_stack_dumps()
        self._watched_thread = threading.get_ident()
        self._reset(time.monotonic())
        self._done = threading.Event()
        threading.Thread(target=self._watch, args=(self._done,), name="hang-detector", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()

    def step_done(self, seconds: float) -> dict[str, float]:
        """Return the metrics of a step of this duration; log a rank that was slow in several consecutive steps."""
        waited, slow = self._slow.step_done(seconds)
        if slow is not None:
            rank, last_wait = slow
            logger.warning(
                "%s is slow: the other ranks waited for it in each of the last %d steps, in the last step for %.0f s",
                *(rank, _SLOW_STEPS, last_wait),
            )
        return {WAITING_METRIC: waited}

    # ---------------------------------------------------------------- the thread

    def _reset(self, now: float) -> None:
        """Discard all observations, because the run makes progress or was suspended."""
        self._progress: Any = None
        self._rank_progress: Any = None
        self._quiet_since = self._no_progress_since = self._next_poll = now
        self._queried_at: float | None = None
        self._standstill_since: float | None = None
        self._warned_kinds: set[str] = set()
        self._activity_logged = -math.inf
        self._status.activity = None

    def _watch(self, done: threading.Event) -> None:
        before, polled_at, failures = self.seconds, time.monotonic(), set[str]()
        while not done.wait(POLL_S):
            now = time.monotonic()
            if now - polled_at > POLL_S + SUSPENDED_S:
                self._reset(now)
            try:
                if self._poll(now):
                    return
            except Exception as error:  # noqa: BLE001 - logged once; the observed processes may end meanwhile
                if not done.is_set() and repr(error) not in failures:
                    failures.add(repr(error))
                    logger.warning("the hang detector could not observe the run: %r", error)
            self.seconds = before + time.thread_time()
            polled_at = time.monotonic()

    def _poll(self, now: float) -> bool:
        """Observe the run once; return whether the run was ended."""
        phase = self._status.current_phase
        progress = (phase, self._status.step, call_count())
        if progress != self._progress:
            self._clear_problem(phase)
            self._reset(now)
            self._progress = progress
        if now - self._quiet_since < QUIET_S or now < self._next_poll:
            return False
        calls = self._open_calls()
        reports = self._query_ranks(calls)
        self._next_poll = time.monotonic() + POLL_S + _POLL_S_PER_RANK * len(reports)
        rank_progress = [(report.rank, report.heartbeat.method, report.heartbeat.done) for report in reports]
        rank_progress.append((-1, None, phase.progress.done + pulse_count()))  # the controller's own
        if rank_progress != self._rank_progress:
            self._rank_progress, self._no_progress_since = rank_progress, now
            if self._standstill_since is None:
                self._clear_problem(phase)
        self.log_activity(reports, now)
        return self._handle(phase, self._diagnose(calls, reports), calls, reports, now)

    def log_activity(self, reports: Sequence[RankReport], now: float) -> None:
        """Set `RunStatus.activity` to the first long operation of a rank; log it every `_ACTIVITY_LOG_S` seconds."""
        active = [(report, report.heartbeat.activity) for report in reports if report.heartbeat.activity is not None]
        self._status.activity = active[0][1].label if active else None
        if active and now - self._activity_logged >= _ACTIVITY_LOG_S:
            self._activity_logged = now
            report, activity = active[0]
            others = f" (and {len(active) - 1} more)" if len(active) > 1 else ""
            logger.info("rank %d of %s%s is %s", report.rank, report.role, others, activity)

    def _handle(
        self, phase: Phase, diagnosis: HangDiagnosis, calls: list[OpenCall], reports: list[RankReport], now: float
    ) -> bool:
        """Depending on the duration of the problem, ignore it, log it, or end the run; return whether the run was
        ended."""
        if diagnosis.kind == "debugged":
            self._no_progress_since = now
        stands_still = diagnosis.kind in ("stopped", "traced", "dead")
        if stands_still and self._standstill_since is None:
            self._standstill_since = now
        elif not stands_still and self._standstill_since is not None:
            self._standstill_since, self._no_progress_since = None, now
            self._clear_problem(phase)
        seconds = now - (self._no_progress_since if self._standstill_since is None else self._standstill_since)
        limit = self._limits.limit(phase.key, diagnosis.kind)
        if seconds >= limit:
            return self._end(phase, diagnosis, calls, reports, seconds)
        warn_after = min(_WARN_AFTER_S.get(diagnosis.kind, limit), limit / 2)
        if diagnosis.kind not in self._warned_kinds and seconds >= warn_after:
            self._warned_kinds.add(diagnosis.kind)
            self._status.problem = f"{self._location(phase)} has waited for {seconds:.0f} s: {diagnosis.sentence}"
            time_limit = "" if limit == math.inf else f" Time limit: {limit:.0f} s (trainer.hang_timeout)."
            logger.warning("%s.%s", self._status.problem, time_limit)
        return False

    def _clear_problem(self, phase: Phase) -> None:
        if self._status.problem is not None:
            logger.warning("%s continues", self._location(phase))
            self._status.problem = None
        self._warned_kinds.clear()

    def _end(
        self,
        phase: Phase,
        diagnosis: HangDiagnosis,
        calls: list[OpenCall],
        reports: list[RankReport],
        seconds: float,
    ) -> bool:
        """If all culprits can be restarted in place, kill them and return False. Otherwise make all open calls raise a
        HangError, and return True."""
        sentence = f"{self._location(phase)} has hung for {seconds:.0f} s: {diagnosis.sentence}"
        groups = {(call.group.role, rank): call.group for call in calls for rank in range(call.group.world_size)}
        culprits = [(groups[report.role, report.rank], report.rank) for report in diagnosis.culprits]
        helpers = [report.heartbeat.helper for report in diagnosis.culprits]
        if culprits and all(helper or group.expendable for helper, (group, _) in zip(helpers, culprits, strict=True)):
            logger.warning("%s. These processes hold no training state: they are killed and restarted.", sentence)
            self._kill(culprits, [helper[0] if helper else None for helper in helpers])
            self._reset(time.monotonic())
            return False
        error = self._error(phase, sentence, diagnosis, calls, reports)
        self._status.problem, self._status.hang = sentence, error
        logger.error("%s", sentence)
        for call in open_calls():  # of all threads: clean-up may wait for them, too
            call.abort_error = error
        time.sleep(RAISE_S)
        stopped = [report.state == "stopped" for report in diagnosis.culprits]
        self._kill([rank for rank, is_stopped in zip(culprits, stopped, strict=True) if is_stopped])
        if not calls and self._raise_in_controller is not None:
            self._raise_in_controller(error)
        return True

    def _error(
        self,
        phase: Phase,
        sentence: str,
        diagnosis: HangDiagnosis,
        calls: Sequence[OpenCall],
        reports: Sequence[RankReport],
    ) -> HangError:
        stack = show(self._controller_stack())
        detail = f"{report_table(reports)}\nthe controller:\n{stack}" if reports else stack
        named = next(iter(diagnosis.culprits or diagnosis.waiters), None)
        if named is None:
            host = f"{socket.gethostname()} pid {os.getpid()}"
            error = HangError(sentence, "controller", 0, host, calls[0].method if calls else phase.key, detail)
        else:
            method = next(call.method for call in calls if call.group.role == named.role)
            error = HangError(sentence, named.role, named.rank, f"{named.host} pid {named.pid}", method, detail)
        error.phase, error.step = phase.key or None, self._status.step + 1
        return error

    # ---------------------------------------------------------------- observations

    def _open_calls(self) -> list[OpenCall]:
        """Return the calls that the watched thread waits for; else those of other threads, which it may wait for."""
        calls = open_calls()
        return [call for call in calls if call.thread == self._watched_thread] or calls

    def _query_ranks(self, calls: Sequence[OpenCall]) -> list[RankReport]:
        now, before, self._queried_at = time.monotonic(), self._queried_at, time.monotonic()
        reports: list[RankReport] = []
        for call in {id(call.group.processes): call for call in reversed(calls)}.values():
            if self._reports is None:
                from verl.single_controller.ray.rank_monitor import RankReports

                self._reports = RankReports()
            if not call.group.processes:
                continue
            group_reports = self._reports.collect(call.group, call.start, self._suspects_hang(now), _ANSWER_TIMEOUT_S)
            if (slow := slowest_rank(group_reports)) is not None and before is not None:
                self._slow.record_wait(rank_name(slow), now - before)
            reports += group_reports
        return reports

    def _suspects_hang(self, now: float) -> bool:
        return self._standstill_since is not None or now - self._no_progress_since >= _SUSPECT_S

    def _diagnose(self, calls: Sequence[OpenCall], reports: Sequence[RankReport]) -> HangDiagnosis:
        controller = diagnose_controller(self._controller_stack())
        if starting := [call.group.role for call in calls if not call.group.processes]:
            blocked = self._reports.nodes.find_stopped_worker() if self._suspects_hang(time.monotonic()) else None
            return diagnose_start(starting[0], blocked)
        is_other_thread = bool(calls) and calls[0].thread != self._watched_thread
        if not reports or (controller.kind in ("user", "debugged") and is_other_thread):
            return controller
        return diagnose_hang(reports)

    def _controller_stack(self) -> Any:
        return own_stacks(self._watched_thread).get(self._watched_thread, ())

    def _kill(self, ranks: Sequence[tuple[Any, int]], helpers: Sequence[int | None] | None = None) -> None:
        """Kill these ranks; where a rank has a helper process in `helpers`, kill that instead."""
        for (group, rank), helper in zip(ranks, helpers or [None] * len(ranks), strict=True):
            process = group.processes[rank]
            self._reports.nodes.kill(process if helper is None else replace(process, pid=helper))

    def _location(self, phase: Phase) -> str:
        if not self._status.total:
            return "the start of the run"
        return f"{phase.key or 'the code between phases'} of step {self._status.step + 1}"


class HangLimits:
    """Time limits without progress, per phase: `timeout`, or if that is None, limits derived from earlier phases.

    `load`: factor for the time limit of start-up on a busy machine (`load_factor`).
    """

    def __init__(self, timeout: float | None, load: float = 1.0) -> None:
        self._timeout, self._start_limit = timeout, _MIN_LIMIT_S * load
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT_PHASES))

    def record_phase(self, phase: str, seconds: float) -> None:
        """Record the duration of a phase."""
        self._recent[phase].append(seconds)

    def limit(self, phase: str, kind: str = "") -> float:
        """Return the limit of a phase for a diagnosis of this kind."""
        if kind == "traced":
            return math.inf  # a debugger is attached
        cannot_run = kind in ("stopped", "dead")
        if self._timeout is not None:
            # The configured timeout is for phases; process start and model loading may take longer.
            loads_model = phase.startswith(RESTART_PHASE) or not (self._recent or phase)
            is_start = kind == "starting" or (loads_model and not cannot_run)
            return max(self._timeout, self._start_limit) if is_start else self._timeout
        if cannot_run:
            return _STANDSTILL_S
        if phase in self._recent:
            return max(_MIN_LIMIT_S, _LIMIT_FACTOR * max(self._recent[phase]))
        # Between phases, the limit of the longest phase applies.
        return _UNKNOWN_PHASE_S if phase or not self._recent else max(map(self.limit, self._recent))


class SlowRanks:
    """Measures, per step, how long the other ranks waited for one rank."""

    def __init__(self) -> None:
        self._waited: dict[str, float] = defaultdict(float)
        self._consecutive_steps: dict[str, int] = defaultdict(int)

    def record_wait(self, rank: str, seconds: float) -> None:
        """Record that the other ranks waited for this rank."""
        self._waited[rank] += seconds

    def step_done(self, seconds: float) -> tuple[float, tuple[str, float] | None]:
        """Return the longest wait for one rank in this step of `seconds`; and of the ranks that were slow in several
        consecutive steps, the slowest one and the wait for it in this step."""
        waited, self._waited = self._waited, defaultdict(float)
        slow = [rank for rank, time in waited.items() if time > _SLOW_SHARE * seconds]
        self._consecutive_steps = defaultdict(int, {rank: self._consecutive_steps[rank] + 1 for rank in slow})
        always_slow = [rank for rank, steps in self._consecutive_steps.items() if steps % _SLOW_STEPS == 0]
        slowest = max(always_slow, key=waited.__getitem__, default=None)
        return max(waited.values(), default=0.0), None if slowest is None else (slowest, waited[slowest])


def raise_in_main_thread() -> Callable[[HangError], None] | None:
    """Return a function that raises an error in the main thread, even if that is blocked; None in other threads."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGRTMIN"):
        return None
    errors: list[HangError] = []

    def on_signal(number: int, frame: Any) -> None:
        raise errors[-1]

    number, thread = signal.SIGRTMIN + 8, threading.get_ident()
    signal.signal(number, on_signal)

    def raise_error(error: HangError) -> None:
        errors.append(error)
        signal.pthread_kill(thread, number)

    return raise_error
