"""Utilization of trainer and rollout in async modes: idle shares, and the configuration key that would reduce them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from verl.config.layout import ACTOR, ROLLOUT

__all__ = ["IdleShares", "Setup", "Utilization", "tuning_advice"]

# Phases in which the trainer waits for scored responses.
_WAITING = ("gen", "reward")
# Smaller idle shares are not worth a change.
_NEGLIGIBLE = 0.1
# Training limits the run if the trainer's idle share is below this fraction of the rollout's; generation, if the
# rollout's is below this fraction of the trainer's. Measured with benchmarks/async_pools.py: below it, more devices for
# the limiting side gain more than a larger staleness.
_TRAINING_LIMITS, _GENERATION_LIMITS = 0.25, 0.5
# If the mean response is longer than this fraction of the longest one in its batch, little time is lost in the tail.
_EVEN = 0.7


@dataclass(frozen=True)
class IdleShares:
    """Idle shares over the run, 0 to 1."""

    trainer: float
    """Share of the training time in which the trainer waited for responses."""
    rollout: float
    """Unused share of the rollout's capacity. The capacity is the largest number of responses that were in flight at
    the same time, but at most `Utilization.at_once`."""


class Setup(NamedTuple):
    """Properties of the run that `tuning_advice` depends on."""

    mode: str
    max_staleness: int
    partial_rollout: bool
    own_devices: bool
    """The rollout has its own devices."""
    reached: int
    """The largest staleness that was trained."""
    loops_limit: bool = False
    """Trajectories of agents waited for a loop worker although the engines had capacity."""
    evenness: float = 0.0
    """Mean response length of a batch over its longest response."""


class Utilization:
    """Accumulates idle times over the steps of a run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, at_once: int | None = None) -> None:
        """`at_once`: number of responses that the rollout can generate concurrently; others are queued."""
        self.at_once = at_once
        self._clock, self._lock = clock, threading.Lock()
        self._changed_at, self._in_flight, self._max_in_flight = clock(), 0, 0
        self._load_s = self._step_load_s = 0.0
        """Integral of the responses in flight over time, of finished steps and of the current step."""
        self._waited_s = self._trained_s = self._elapsed_s = 0.0
        self._step_began_at = self._changed_at

    def begin(self) -> None:
        """Start to measure: earlier times, such as model loading and a first validation, do not count."""
        with self._lock:
            self._changed_at = self._step_began_at = self._clock()

    def set_in_flight(self, answers: int) -> None:
        """Record the number of responses in flight. Thread-safe."""
        with self._lock:
            now = self._clock()
            answers = answers if self.at_once is None else min(answers, self.at_once)
            self._step_load_s += self._in_flight * (now - self._changed_at)
            self._changed_at, self._in_flight = now, answers
            self._max_in_flight = max(self._max_in_flight, answers)

    def step(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """End a step and return its metrics. `seconds`: durations of its phases. The rollout's time counts from the end
        of the last step."""
        self.set_in_flight(self._in_flight)
        with self._lock:
            elapsed, load_s = self._changed_at - self._step_began_at, self._step_load_s
            self._step_began_at, self._step_load_s = self._changed_at, 0.0
            self._elapsed_s += elapsed
            self._load_s += load_s
        waited = sum(seconds.get(name, 0.0) for name in _WAITING)
        self._waited_s += waited
        self._trained_s += seconds["step"]
        return {
            "trainer/idle_ratio": waited / max(seconds["step"], 1e-9),
            "rollouter/idle_ratio": self._unused(load_s, elapsed),
        }

    def shares(self) -> IdleShares | None:
        """Idle shares over all steps so far; None before the first."""
        if not self._trained_s:
            return None
        return IdleShares(self._waited_s / self._trained_s, self._unused(self._load_s, self._elapsed_s))

    @property
    def was_full(self) -> bool:
        """Whether `at_once` responses were in flight at some time."""
        return self.at_once is not None and self._max_in_flight >= self.at_once

    def _unused(self, load_s: float, elapsed: float) -> float:
        return 1.0 - load_s / max(self._max_in_flight * elapsed, 1e-9) if self._max_in_flight else 1.0


def tuning_advice(idle: IdleShares, run: Setup) -> str:
    """One line for the log: the idle shares, the likely bottleneck, and the key that would help."""
    shares = f"trainer idle {idle.trainer:.0%} (waiting for responses), rollout idle {idle.rollout:.0%}"
    if idle.trainer < _NEGLIGIBLE and idle.rollout < _NEGLIGIBLE:
        return f"{shares}: little is left to gain"
    if idle.trainer < max(_NEGLIGIBLE, _TRAINING_LIMITS * idle.rollout):
        return f"{shares}: training limits the run; what helps: {_faster_training(run)}"
    if idle.rollout < max(_NEGLIGIBLE, _GENERATION_LIMITS * idle.trainer):
        return f"{shares}: generation limits the run; what helps: {_faster_generation(run)}, or shorter responses"
    if run.evenness > _EVEN and not run.own_devices:
        lengths = f"the mean response is {run.evenness:.0%} as long as the longest of its batch"
        return f"{shares}; {lengths}; what helps: trainer.mode=sync, which does not compute old log-probs separately"
    if not run.partial_rollout:
        key = "trainer.mode=async" if run.mode == "one_step_off" else "trainer.partial_rollout=True"
        return f"{shares}: both wait for the last responses before a weight sync; what helps: {key}"
    if run.reached >= run.max_staleness:
        key = f"trainer.max_staleness={run.max_staleness + 1}"
        return f"{shares}: both wait for the longest responses; what helps: {key}"
    # The staleness limit was never reached: a larger one would have no effect.
    remedy = _faster_training(run) if run.own_devices else _faster_generation(run)
    return f"{shares}: the trainer waits for the last responses of a batch; what helps: {remedy}"


def _faster_training(run: Setup) -> str:
    if run.own_devices:
        return f"move devices to the trainer (trainer.n_gpus_per_node up, {ROLLOUT}.n_gpus_per_node down)"
    return f"a faster update (larger {ACTOR}.ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu)"


def _faster_generation(run: Setup) -> str:
    if run.loops_limit:
        return f"more concurrent trajectories ({ROLLOUT}.agent.max_concurrent_requests=null, which is automatic)"
    if run.own_devices:
        return f"more rollout devices ({ROLLOUT}.n_gpus_per_node, {ROLLOUT}.nnodes)"
    return f"more concurrent responses ({ROLLOUT}.gpu_memory_utilization, {ROLLOUT}.max_num_seqs)"
