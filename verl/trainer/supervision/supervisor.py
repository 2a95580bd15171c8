"""The process that a user starts: its child is the run, and is started again when it dies. Imports no Ray, no torch.

What an attempt started and left behind is killed after it: its orphans become children of this process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from verl.trainer.common.ending import what_the_same_command_does
from verl.trainer.supervision.forward import Forwarded
from verl.trainer.supervision.policy import GiveUp, Record, decide
from verl.trainer.supervision.run import Run
from verl.trainer.supervision.saved_steps import SavedSteps
from verl.utils.process_tree import adopt_orphans, children, with_descendants

logger = logging.getLogger(__name__)

_GONE_S = 10.0

C = TypeVar("C")


@dataclass(frozen=True)
class Attempt(Generic[C]):
    """What the child gets: its configuration, and the Ray head that all attempts share, where there is one."""

    config: C
    head: Any = None


def supervise(
    config: C,
    keep_head: Callable[[Any], Any] = lambda head: None,
    stop_head: Callable[[Any], None] = lambda head: None,
) -> Attempt[C]:
    """Returns in a child of this process, once per attempt. This process itself exits here when the run is over.

    All attempts share an id, by which trackers know that they are one run (`VERL_RUN`).
    `keep_head` gives a head that runs, from the one so far, which may have died; `stop_head` ends it.
    """
    supervisor, strangers = Supervisor(config), with_descendants(os.getpid())[1:]
    adopt_orphans()
    os.environ["VERL_RUN"] = uuid.uuid4().hex[:12]
    forwarded = Forwarded()
    while True:
        supervisor.head = keep_head(supervisor.head)
        with forwarded:
            run = Run.fork(forwarded, supervisor.attempts)
            if run is None:
                return supervisor.next_attempt()
            code = run.wait()
            end_descendants(spared=[*strangers, *([] if supervisor.head is None else [supervisor.head.pid])])
            if not supervisor.starts_again(run, code, forwarded):
                break
    stop_head(supervisor.head)
    end_descendants(spared=strangers)
    supervisor.end(run, code, forwarded)


def wants_supervision(config: Any, wanted: bool) -> bool:
    """Whether a run is to be supervised; a key that then means nothing is named."""
    if not wanted and config.trainer.max_restarts > 0 and "trainer.max_restarts" in config.changed:
        logger.warning("trainer.max_restarts has no effect: call with supervised=True, or start the program itself.")
    return wanted and config.trainer.max_restarts > 0


class Supervisor(Generic[C]):
    """What is known over all attempts of one command."""

    def __init__(self, config: C) -> None:
        self._config, self._trainer = config, getattr(config, "trainer")  # noqa: B009 - of any configuration
        self._saved, self._record = SavedSteps(self._trainer), Record()
        self.attempts = 0
        self.head: Any = None
        self._pausing = False

    def next_attempt(self) -> Attempt[C]:
        """In the child."""
        first = self.attempts == 0
        return Attempt(self._config if first else self._saved.config_of_next(self._config), self.head)

    def starts_again(self, run: Run, code: int, forwarded: Forwarded) -> bool:
        """Say how the attempt ended and what comes next; wait, if there is another."""
        self.attempts += 1
        ending = run.ending(code)
        if ending is None or forwarded.asked is not None:
            return False
        limit = self._trainer.max_restarts
        self._record, decision = decide(self._record, ending, self._saved.name_of_newest(), limit)
        if isinstance(decision, GiveUp):
            if decision.reason is not None:
                logger.error("not started again: %s", decision.reason)
            return False
        for line in run.last_lines[:1]:  # the file with the traceback
            logger.warning(line)
        lost = self._saved.what_is_lost(run.step)
        logger.warning("restart %d of %d in %.0f s: %s; %s", decision.number, limit, decision.delay, ending.cause, lost)
        forwarded.wait(decision.delay)
        self._pausing = forwarded.asked is not None
        return not self._pausing

    def end(self, run: Run, code: int, forwarded: Forwarded) -> NoReturn:
        """Exit as the run did; what it left to us to say, its cause, comes last."""
        by, ending, lines = forwarded.asked, run.ending(code), run.last_lines
        restart = what_the_same_command_does(self._trainer)
        if by == "SIGINT" and (code < 0 or forwarded.at_once or self._pausing):
            raise KeyboardInterrupt
        if self._pausing:
            lines = [f"stopped by {by} before the restart; {restart}"]
        elif by is not None and code < 0:
            signal.signal(signal.Signals[by], signal.SIG_DFL)
            os.kill(os.getpid(), signal.Signals[by])
        elif not lines and ending is not None and (code < 0 or not run.has_spoken):
            lines = [f"{ending.cause[0].upper()}{ending.cause[1:]}. {restart[0].upper()}{restart[1:]}."]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.exit(code if code >= 0 else 1)


def end_descendants(spared: Collection[int] = ()) -> None:
    """Kill what this process started or adopted, and all below it, until nothing is left but the spared children."""
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        left = [pid for child in children(os.getpid()) if child not in spared for pid in with_descendants(child)]
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children(os.getpid()):
            if pid not in spared:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    logger.warning("processes that cannot be killed are left: %s", left)
