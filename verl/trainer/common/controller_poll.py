"""ControllerPoll: the driver asks the controller where it stands, with a limit, and judges when no answer comes."""

from __future__ import annotations

import logging
import math
import socket
import time
from typing import Any

from verl.trainer.common.own_ray import OwnRay
from verl.trainer.supervision.report import tell
from verl.utils.process_tree import kill_tree, why_not_running
from verl.utils.resources import load_factor

logger = logging.getLogger(__name__)

_TOLD_AFTER_S = 5.0
# Whoever is stopped comes to nothing by itself; whoever only does not answer may be busy.
_STOPPED_S, _SILENT_S = 60.0, 300.0
# Between two looks. Longer, and nobody could run: the machine, or the job, was suspended.
_PAUSED_S = 10.0
# What the controller ends with itself comes sooner, with its traceback.
_OWN_ENDING_S = 5.0
_ROLE = "TaskRunner"
_STANDS = {"stopped": "stopped (SIGSTOP)", "traced": "stopped by a debugger"}
# A stop signal waits this long for a new report.
_FRESH_S = 2.0


class ControllerPoll:
    """Of a TaskRunner (or a class of the user's own, which need not say where it stands) and of Ray's processes."""

    def __init__(self, runner: Any, own: OwnRay, timeout: float | None) -> None:
        self._runner, self._own, self._timeout = runner, own, timeout
        self._asked: Any = None
        self._answered: float | None = None  # before it has started there is nothing to judge
        self._standstill: tuple[str, float] | None = None
        self._hang_seen: float | None = None
        self._told: str | None = None
        self._looked = time.monotonic()
        self.standing: Any = None
        """The last that came."""

    def before_first_step(self) -> bool:
        """Whether the run has not begun its first step; False if the runner does not report its status.

        The last status may be seconds old. If it says so, a new one is requested, with a timeout of `_FRESH_S`.
        """
        if not hasattr(self._runner, "standing"):
            return False
        if self.standing is None or getattr(self.standing, "starting", False):
            self._refresh()
        return self.standing is None or getattr(self.standing, "starting", False)

    def _refresh(self) -> None:
        import ray

        try:
            self.standing = ray.get(self._runner.standing.remote(), timeout=_FRESH_S)
        except ray.exceptions.RayError as error:
            logger.debug("the controller did not report its status within %.0f s: %r", _FRESH_S, error)

    def look(self) -> None:
        """Ask, or see whether the answer is there; raises HangError once nothing is to be hoped for. Never waits."""
        before, self._looked = self._looked, time.monotonic()
        now = self._looked
        if now - before > _PAUSED_S:
            self._answered, self._standstill = self._answered and now, None
        self._ask(now)
        hang = getattr(self.standing, "hang", None)
        if hang is not None:
            self._hang_seen = self._hang_seen or now
            if now - self._hang_seen >= _OWN_ENDING_S:
                raise hang
        self._look_at_processes(now)

    def _ask(self, now: float) -> None:
        import ray

        if not hasattr(self._runner, "standing"):
            return
        if self._asked is None:
            self._asked = self._runner.standing.remote()
        if ray.wait([self._asked], timeout=0, fetch_local=False)[0]:
            asked, self._asked, self._answered = self._asked, None, now
            try:
                self.standing = ray.get(asked, timeout=1)
            except ray.exceptions.RayError as error:
                logger.debug("the controller does not say where it stands: %r", error)  # its run says why
            else:
                if self.standing.total:
                    tell(step=self.standing.step + 1, phase=self.standing.phase)

    def _look_at_processes(self, now: float) -> None:
        pid = getattr(self.standing, "pid", 0)
        here = pid and self.standing.host == socket.gethostname()
        why, limit = self._own.stopped(), self._timeout or _STOPPED_S
        if why is None and here and (state := why_not_running(pid)) in _STANDS:
            why = f"the controller (TaskRunner, pid {pid}) is {_STANDS[state]}"
            limit = math.inf if state == "traced" else limit  # somebody looks at it
        if why is None:
            self._standstill = None
            return self._look_at_silence(now, pid if here else 0)
        if self._standstill is None or self._standstill[0] != why:
            self._standstill = why, now
        self._answered = self._answered and now  # it could not
        self._weigh(why, now - self._standstill[1], limit, _TOLD_AFTER_S)

    def _look_at_silence(self, now: float, pid: int) -> None:
        seconds = 0.0 if self._answered is None else now - self._answered
        if seconds < _TOLD_AFTER_S:
            self._told = None
            return
        limit = self._timeout or _SILENT_S * load_factor()
        if seconds >= limit or (seconds >= limit / 2 and self._told is None):
            why, detail = self._silent(pid)
            self._weigh(why, seconds, limit, 0.0, detail)

    def _silent(self, pid: int) -> tuple[str, str]:
        from verl.trainer.common.hang_verdict import judge_controller
        from verl.utils.stacks import show, stacks_of

        who = f"the controller (TaskRunner{f', pid {pid}' if pid else ''}) does not answer"
        stacks = stacks_of(pid) if pid else {}
        if not stacks:
            return who, ""
        # The thread that trains is the one with most of this package's frames.
        main = max(stacks.values(), key=lambda stack: sum(frame.origin == "verl" for frame in stack))
        return judge_controller(main, f"{who}: it").sentence, "\n\n".join(map(show, stacks.values()))

    def _weigh(self, why: str, seconds: float, limit: float, told_after: float, detail: str = "") -> None:
        if seconds >= limit:
            from verl.single_controller.base.errors import HangError

            pid, host = getattr(self.standing, "pid", 0), getattr(self.standing, "host", "?")
            if pid and host == socket.gethostname():
                kill_tree(pid)
            self._own.kill()
            error = HangError(f"the run hangs for {seconds:.0f} s: {why}", _ROLE, 0, f"{host} pid {pid}", "run", detail)
            error.at_once = True
            if getattr(self.standing, "phase", ""):
                error.phase, error.step = self.standing.phase, self.standing.step + 1
            raise error
        if seconds >= told_after and self._told != why:
            self._told = why
            until = "" if limit == math.inf else f" It is given up after {limit:.0f} s."
            logger.warning("the run waits for %.0f s: %s.%s", seconds, why, until)
