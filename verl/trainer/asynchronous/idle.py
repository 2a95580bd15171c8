"""Who waits for whom: the share of time in which trainer and rollout had nothing to do, and the key that would help."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from verl.config.layout import ACTOR, ROLLOUT

__all__ = ["Idle", "IdleTime", "Setup", "verdict"]

# Phases in which the trainer waits for scored answers.
_WAITING = ("gen", "reward")
# Less than this share of idle time is not worth a change.
_LITTLE = 0.1
# The trainer limits a run where it waits less than this share of what the rollout has to spare, and the other way
# round. With benchmarks/async_pools.py: from there on more devices for the one gain more than older answers do.
_TRAINER_WAITS, _ROLLOUT_WAITS = 0.25, 0.5
# Where answers are longer than this share of their batch's longest, waiting for that one wastes little.
_EVEN = 0.7


@dataclass(frozen=True)
class Idle:
    """Shares of the run's time."""

    trainer: float
    """It waited for answers."""
    rollout: float
    """What it could have answered beside what it did. Its whole load are the most answers that were ever under way, but
    no more than it works on at once: what waits for its turn there does not make it busier."""


class Setup(NamedTuple):
    """What a verdict has to know of the run."""

    mode: str
    max_staleness: int
    partial_rollout: bool
    own_devices: bool
    """The rollout does not share the trainer's."""
    reached: int
    """The largest staleness that was trained."""
    loops_limit: bool = False
    """Agents' conversations waited for a loop worker although the engines had capacity."""
    evenness: float = 0.0
    """Mean length of a batch's answers over its longest."""


class IdleTime:
    """Adds up waiting times over the steps of a run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, at_once: int | None = None) -> None:
        """`at_once`: answers that the rollout works on at a time, the others wait for their turn."""
        self.at_once = at_once
        self._clock, self._lock = clock, threading.Lock()
        self._at, self._under_way, self._most = clock(), 0, 0
        self._load_s = self._step_load_s = 0.0  # answers x seconds
        self._waited_s = self._trained_s = self._watched_s = 0.0
        self._step_at = self._at

    def begin(self) -> None:
        """Time counts from here: what came before, the loading of models or a validation, was not for answers."""
        with self._lock:
            self._at = self._step_at = self._clock()

    def under_way(self, answers: int) -> None:
        """So many answers are asked for and not there yet. From any thread."""
        with self._lock:
            now = self._clock()
            answers = answers if self.at_once is None else min(answers, self.at_once)
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

    def shares(self) -> Idle | None:
        """Over all steps so far; None if there was none."""
        if not self._trained_s:
            return None
        return Idle(self._waited_s / self._trained_s, self._unused(self._load_s, self._watched_s))

    @property
    def was_full(self) -> bool:
        """There was a time with as many answers under way as it works on at once."""
        return self.at_once is not None and self._most >= self.at_once

    def _unused(self, load_s: float, passed: float) -> float:
        return 1.0 - load_s / max(self._most * passed, 1e-9) if self._most else 1.0


def verdict(idle: Idle, run: Setup) -> str:
    """One line: who waits, and the key that would help."""
    said = f"the trainer waited for answers {idle.trainer:.0%} of the time, the rollout had {idle.rollout:.0%} to spare"
    if idle.trainer < _LITTLE and idle.rollout < _LITTLE:
        return f"{said}: little is left to gain"
    if idle.trainer < max(_LITTLE, _TRAINER_WAITS * idle.rollout):
        return f"{said}: training limits the run; what helps: {_faster_training(run)}"
    if idle.rollout < max(_LITTLE, _ROLLOUT_WAITS * idle.trainer):
        return f"{said}: generation limits the run; what helps: {_faster_generation(run)}, or shorter answers"
    if run.evenness > _EVEN and not run.own_devices:
        alike = f"answers are {run.evenness:.0%} as long as the longest of their batch: a step has no tail to fill"
        return f"{said}, and {alike}; what helps: trainer.mode=sync, which needs no pass for stale answers"
    if not run.partial_rollout:
        helps = "trainer.mode=async" if run.mode == "one_step_off" else "trainer.partial_rollout=True"
        return f"{said}: both wait while the last answers before a hand-over finish; what helps: {helps}"
    if run.reached >= run.max_staleness:
        helps = f"trainer.max_staleness={run.max_staleness + 1}"
        return f"{said}: the longest answers hold up both; what helps: {helps}"
    # No answer was as old as it might have been: a larger limit would change nothing.
    helps = _faster_training(run) if run.own_devices else _faster_generation(run)
    return f"{said}: the trainer waits for the last answers of a batch; what helps: {helps}"


def _faster_training(run: Setup) -> str:
    if run.own_devices:
        return f"devices of the rollout's for the trainer (trainer.n_gpus_per_node up, {ROLLOUT}.n_gpus_per_node down)"
    return f"a faster update (larger {ACTOR}.ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu)"


def _faster_generation(run: Setup) -> str:
    if run.loops_limit:
        return f"more concurrent conversations ({ROLLOUT}.agent.max_concurrent_requests=null, which is automatic)"
    if run.own_devices:
        return f"more devices for it ({ROLLOUT}.n_gpus_per_node, {ROLLOUT}.nnodes)"
    return f"more room for answers at once ({ROLLOUT}.gpu_memory_utilization, {ROLLOUT}.max_num_seqs)"
