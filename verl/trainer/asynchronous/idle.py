"""Who waits for whom: the share of time in which trainer and rollout had nothing to do, and the key that would help."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from verl.config.layout import ROLLOUT

# Phases in which the trainer waits for scored answers.
_WAITING = ("gen", "reward")
# Less than this share of idle time is not worth a change.
_LITTLE = 0.1


@dataclass(frozen=True)
class Idle:
    """Shares of the run's time."""

    trainer: float
    """It waited for answers."""
    rollout: float
    """What it could have answered beside what it did: the most answers that were ever under way are its whole load."""


class IdleTime:
    """Adds up waiting times over the steps of a run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._at, self._under_way, self._most = clock(), 0, 0
        self._load_s = self._step_load_s = 0.0  # answers x seconds
        self._waited_s = self._trained_s = self._watched_s = 0.0
        self._step_at = self._at

    def under_way(self, answers: int) -> None:
        """So many answers are asked for and not there yet. From any thread."""
        with self._lock:
            now = self._clock()
            self._step_load_s += self._under_way * (now - self._at)
            self._at, self._under_way, self._most = now, answers, max(self._most, answers)

    def step(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the step that ended, given its seconds by phase; the rollout's are since the last one ended."""
        self.under_way(self._under_way)
        with self._lock:
            passed, load_s = self._at - self._step_at, self._step_load_s
            self._step_at, self._step_load_s = self._at, 0.0
            self._watched_s += passed
            self._load_s += load_s
        waited = sum(seconds.get(name, 0.0) for name in _WAITING)
        self._waited_s += waited
        self._trained_s += seconds["step"]
        return {
            "trainer/idle_ratio": waited / max(seconds["step"], 1e-9),
            "rollouter/idle_ratio": self._unused(load_s, passed),
        }

    def shares(self) -> Idle:
        """Over all steps so far."""
        return Idle(self._waited_s / max(self._trained_s, 1e-9), self._unused(self._load_s, self._watched_s))

    def _unused(self, load_s: float, passed: float) -> float:
        return 1.0 - load_s / max(self._most * passed, 1e-9) if self._most else 1.0


def verdict(idle: Idle, mode: str, max_staleness: int, partial_rollout: bool, own_devices: bool) -> str:
    """One line: who waits, and the key that would help. `own_devices`: the rollout does not share the trainer's."""
    said = f"the trainer waited for answers {idle.trainer:.0%} of the time, the rollout had {idle.rollout:.0%} to spare"
    if idle.trainer < _LITTLE and idle.rollout < _LITTLE:
        return f"{said}: little is left to gain"
    if idle.trainer < _LITTLE:
        return f"{said}: training limits the run; what helps: {_faster_training(max_staleness, own_devices)}"
    if idle.rollout < _LITTLE:
        more = f"more devices for it ({ROLLOUT}.n_gpus_per_node, {ROLLOUT}.nnodes)"
        less = f"more room for answers at once ({ROLLOUT}.gpu_memory_utilization, {ROLLOUT}.max_num_seqs)"
        return f"{said}: generation limits the run; what helps: {more if own_devices else less}, or shorter answers"
    if not partial_rollout:
        helps = "trainer.mode=async" if mode == "one_step_off" else "trainer.partial_rollout=True"
        return f"{said}: both wait while the last answers before a hand-over finish; what helps: {helps}"
    return f"{said}: they wait for each other; what helps: trainer.max_staleness={max_staleness + 1}"


def _faster_training(max_staleness: int, own_devices: bool) -> str:
    remedy = (
        f"devices of the rollout's for the trainer (trainer.n_gpus_per_node up, {ROLLOUT}.n_gpus_per_node down)"
        if own_devices
        else "a faster update (see the phases above)"
    )
    return remedy + (
        f"; trainer.max_staleness={max_staleness - 1} gives fresher answers meanwhile" if max_staleness > 1 else ""
    )
