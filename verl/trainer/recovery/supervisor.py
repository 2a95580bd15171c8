"""Supervisor: the process that a user starts. It executes a run in a child process and restarts it if it fails.

An attempt is one such child process. Its orphaned processes become children of the supervisor, which kills them.
Imports neither Ray nor torch.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from verl.config.trainer import RecordConfig
from verl.trainer.recovery.exit_messages import describe_resume
from verl.trainer.recovery.signals import SignalForwarder, StopSignal
from verl.trainer.recovery.supervised_process import AttemptFailure, SupervisedProcess
from verl.utils.checkpoint.folders import RECORD_FOLDER, has_expected_sizes, newest_first, step_of
from verl.utils.checkpoint.manifest import MANIFEST
from verl.utils.disk import JsonLines
from verl.utils.fs import expand_path
from verl.utils.process_tree import adopt_orphans, children, with_descendants

logger = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 10.0
# Delay before the first restart; it doubles with every further one, up to the maximum.
_FIRST_DELAY_S = 2.0
_MAX_DELAY_S = 60.0

C = TypeVar("C")


@dataclass(frozen=True)
class SupervisedAttempt(Generic[C]):
    """Input of a child process."""

    config: C
    head: Any = None
    """The Ray head that all attempts share; None: each attempt starts its own Ray."""


def supervise(
    config: C,
    ensure_head: Callable[[Any], Any] = lambda head: None,
    stop_head: Callable[[Any], None] = lambda head: None,
) -> SupervisedAttempt[C]:
    """Fork a child for every attempt and return in the child. In this process it never returns: it exits when the run
    has ended.

    All attempts have the same id in `VERL_RUN`, by which trackers recognise them as one run. `ensure_head` receives the
    current Ray head, which may have died, and returns a running head; `stop_head` ends it.
    """
    # Earlier descendants of this process do not belong to the run and are not killed with it.
    supervisor, unrelated = Supervisor(config), with_descendants(os.getpid())[1:]
    adopt_orphans()
    os.environ["VERL_RUN"] = uuid.uuid4().hex[:12]
    forwarder = SignalForwarder()
    while True:
        supervisor.head = ensure_head(supervisor.head)
        with forwarder:
            process = SupervisedProcess.fork(forwarder, supervisor.attempts)
            if process is None:
                return supervisor.next_attempt()
            exit_code = process.wait()
            head_pids = [] if supervisor.head is None else [supervisor.head.pid]
            kill_descendants(keep=[*unrelated, *head_pids])
            if not supervisor.wait_for_restart(process, exit_code, forwarder):
                break
    stop_head(supervisor.head)
    kill_descendants(keep=unrelated)
    supervisor.exit(process, exit_code, forwarder)


def wants_supervision(config: Any, supervised: bool) -> bool:
    """Return whether to supervise a run; warn if `trainer.max_restarts` was set but has no effect."""
    if not supervised and config.trainer.max_restarts > 0 and "trainer.max_restarts" in config.changed:
        logger.warning("trainer.max_restarts has no effect: call with supervised=True, or start the program itself.")
    return supervised and config.trainer.max_restarts > 0


class Supervisor(Generic[C]):
    """The state of one command over all of its attempts."""

    def __init__(self, config: C) -> None:
        self._config, self._trainer = config, getattr(config, "trainer")  # noqa: B009 - C has no bound: every configuration has this block
        self._saved, self._history = SavedSteps(self._trainer), RestartHistory()
        self.attempts = 0
        """Number of attempts that have ended."""
        self.head: Any = None
        """The Ray head that all attempts share; None: each attempt starts its own Ray."""
        self._stopped_in_delay = False
        """Whether a stop signal arrived during the delay before a restart."""

    def next_attempt(self) -> SupervisedAttempt[C]:
        """Return the input of the next child; called in the child."""
        first = self.attempts == 0
        return SupervisedAttempt(self._config if first else self._saved.resume_config(self._config), self.head)

    def wait_for_restart(self, process: SupervisedProcess, exit_code: int, forwarder: SignalForwarder) -> bool:
        """Decide whether to restart after an attempt, and log it; before a restart, wait for its delay.

        Return False if the run has ended: successfully, by an error that would occur again, or by a stop signal.
        """
        self.attempts += 1
        failure = process.failure(exit_code)
        if failure is None or forwarder.received is not None:
            return False
        limit = self._trainer.max_restarts
        self._history, decision = decide_restart(self._history, failure, self._saved.newest_id(), limit)
        if isinstance(decision, GiveUp):
            if decision.reason is not None:
                logger.error("not restarted: %s", decision.reason)
            return False
        for line in process.final_lines[:1]:  # it names the file with the traceback
            logger.warning(line)
        resume = self._saved.describe_restart(process.step)
        logger.warning(
            "restart %d of %d in %.0f s: %s; %s", decision.number, limit, decision.delay, failure.cause, resume
        )
        record_restart(self._saved.root, failure.cause, process.step, self._trainer.record)
        forwarder.wait(decision.delay)
        self._stopped_in_delay = forwarder.received is not None
        return not self._stopped_in_delay

    def exit(self, process: SupervisedProcess, exit_code: int, forwarder: SignalForwarder) -> NoReturn:
        """Exit with the exit code or signal of the child; print its error message if the child has not done so.

        `exit_code`: negative if a signal ended the child.
        """
        stop_signal, failure, lines = forwarder.received, process.failure(exit_code), process.final_lines
        resume = describe_resume(self._trainer)
        was_killed = exit_code < 0
        if process.was_stuck_in_start and stop_signal is not None and not forwarder.received_twice:
            raise StopSignal(stop_signal, before_first_step=True)
        if stop_signal == "SIGINT" and (was_killed or forwarder.received_twice or self._stopped_in_delay):
            raise KeyboardInterrupt
        if self._stopped_in_delay:
            lines = [f"stopped by {stop_signal} before the restart; {resume}"]
        elif stop_signal is not None and was_killed:
            # End by the same signal, so that the caller of the command sees it.
            signal.signal(signal.Signals[stop_signal], signal.SIG_DFL)
            os.kill(os.getpid(), signal.Signals[stop_signal])
        elif not lines and failure is not None and (was_killed or not process.reported_ending):
            lines = [f"{failure.cause[0].upper()}{failure.cause[1:]}. {resume[0].upper()}{resume[1:]}."]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.exit(1 if was_killed else exit_code)


def record_restart(run_folder: Path, cause: str, step: int | None, settings: RecordConfig) -> None:
    """Append the restart to the events of the run's recording, if there is one.

    Safe without a lock: the process that writes the recording has ended.
    """
    if (folder := run_folder / RECORD_FOLDER).is_dir():
        from verl.recording.redaction import Redaction

        # The text after the colon is the message of an exception, which may quote prompts or responses.
        message = Redaction(settings.redact).text(cause) if settings.texts else cause.partition(":")[0]
        event = {"time": round(time.time(), 3), "step": step, "kind": "restart", "message": message}
        try:
            JsonLines(folder / "events.jsonl").append([event])
        except OSError as error:
            logger.warning("the restart could not be recorded in %s: %s", folder, error)


@dataclass(frozen=True)
class Restart:
    """Decision to restart the run after `delay` seconds. `number`: restarts since the last new checkpoint, from 1."""

    number: int
    delay: float


@dataclass(frozen=True)
class GiveUp:
    """Decision against a restart."""

    reason: str | None = None
    """None if the failure itself explains it."""


@dataclass(frozen=True)
class RestartHistory:
    """Restarts and failures since the last new checkpoint."""

    checkpoint_id: str | None = None
    """Id of that checkpoint (`SavedSteps.newest_id`); None: this command has saved none."""
    restarts: int = 0
    locations: frozenset[str] = field(default=frozenset())
    """Where attempts failed (`exit_messages.failure_location`)."""


def decide_restart(
    history: RestartHistory, failure: AttemptFailure, newest_id: str | None, max_restarts: int
) -> tuple[RestartHistory, Restart | GiveUp]:
    """Return the updated history and the decision. A pure function.

    `newest_id`: id of the newest complete checkpoint of this command. A new one is progress and resets the history.
    """
    if newest_id is not None and newest_id != history.checkpoint_id:
        history = RestartHistory(newest_id)
    if not failure.restartable:
        return history, GiveUp()
    if failure.location in history.locations:
        return history, GiveUp(f"it failed twice at the same location ({failure.location})")
    if history.restarts >= max_restarts:
        return history, GiveUp(f"trainer.max_restarts = {max_restarts}, and no step was saved since the first restart")
    locations = history.locations if failure.location is None else history.locations | {failure.location}
    number = history.restarts + 1
    delay = min(_FIRST_DELAY_S * 2 ** (number - 1), _MAX_DELAY_S)
    return RestartHistory(history.checkpoint_id, number, locations), Restart(number, delay)


class SavedSteps:
    """The steps in `trainer.default_local_dir` that this command has saved, without those of earlier commands."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.root = Path(expand_path(trainer.default_local_dir)).absolute()
        self._earlier_ids = {_manifest_id(folder) for folder in newest_first(self.root)}

    def newest(self) -> Path | None:
        """Return the folder of the newest complete step, or None."""
        own = (folder for folder in newest_first(self.root) if _manifest_id(folder) not in self._earlier_ids)
        return next(filter(has_expected_sizes, own), None)

    def newest_id(self) -> str | None:
        """Return an id of the newest step; saving the same step again changes it."""
        newest = self.newest()
        return None if newest is None else f"{newest} {_manifest_id(newest)}"

    def resume_config(self, config: C) -> C:
        """Return the configuration of an attempt that resumes from the newest step.

        `trainer.resume_mode=disable` and `resume_path` apply to the first attempt only. `auto` needs no change: it
        finds the newest step, also among the copies in `trainer.default_hdfs_dir`.
        """
        newest = self.newest()
        if newest is None or self._trainer.resume_mode == "auto":
            return config
        changed: Any = copy.deepcopy(config)
        changed.trainer.resume_mode, changed.trainer.resume_from_path = "resume_path", str(newest)
        return changed

    def describe_restart(self, failed_step: int | None) -> str:
        """Return a clause for the log: where the next attempt resumes, and which steps it repeats.

        `failed_step`: the step in which the last attempt failed, if known.
        """
        newest, mode = self.newest(), self._trainer.resume_mode
        if newest is None and mode == "auto":
            newest = next(filter(has_expected_sizes, newest_first(self.root)), None)
        elif newest is None and mode == "resume_path":
            newest = Path(str(self._trainer.resume_from_path))
        step = 0 if newest is None else step_of(newest.name)
        text = "starts from the beginning" if newest is None else f"resumes at step {step} ({newest})"
        if step is None or failed_step is None or failed_step <= step:
            return text
        repeated = f"step {failed_step} is" if failed_step == step + 1 else f"steps {step + 1}-{failed_step} are"
        return f"{text}, {repeated} repeated"


def kill_descendants(keep: Collection[int] = ()) -> None:
    """Kill all descendants of this process, except the children in `keep` and their descendants.

    Repeated until none is left: descendants of a killed process become children of this one.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        alive = [pid for child in children(os.getpid()) if child not in keep for pid in with_descendants(child)]
        if not alive:
            return
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children(os.getpid()):
            if pid not in keep:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    logger.warning("some processes could not be killed: %s", alive)


def _manifest_id(folder: Path) -> tuple[int, int] | None:
    """Return an id of a saved step, which stays the same when its folder is moved; None without a manifest."""
    try:
        stat = (folder / MANIFEST).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns
