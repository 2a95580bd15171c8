"""Utilization of trainer and rollout in async modes: trajectories in flight, idle shares, tuning advice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from verl.config.layout import ACTOR, ROLLOUT

# Phases in which the trainer waits for scored responses.
_WAITING = ("gen", "reward")
# Smaller idle shares are not worth a change.
_NEGLIGIBLE = 0.1
# Training limits the run if the trainer's idle share is below this fraction of the rollout's; generation, if the
# rollout's is below this fraction of the trainer's. Measured with benchmarks/async_pools.py: below it, more devices for
# the limiting side gain more than a larger staleness.
_TRAINING_LIMITS, _GENERATION_LIMITS = 0.25, 0.5
# If the mean response is longer than this fraction of the longest one in its batch, little time is lost on stragglers.
_EVEN = 0.7


@dataclass(frozen=True)
class IdleShares:
    """Idle shares over the run, 0 to 1."""

    trainer: float
    """Share of the training time in which the trainer waited for responses."""
    rollout: float
    """Unused share of the rollout's capacity: the largest number of responses that were in flight at the same time, but
    at most `Utilization.max_concurrent`."""


class AsyncSetup(NamedTuple):
    """Properties of the run that `tuning_advice` depends on."""

    mode: str
    max_staleness: int
    partial_rollout: bool
    own_devices: bool
    """The rollout has its own devices."""
    trained_staleness: int
    """The largest staleness that was trained."""
    limited_by_loops: bool = False
    """Trajectories of agents waited for a loop worker although the engines had capacity."""
    evenness: float = 0.0
    """Mean response length of a batch over its longest response."""


class Utilization:
    """Accumulates idle times over the steps of a run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_concurrent: int | None = None) -> None:
        """`max_concurrent`: number of responses that the rollout can generate concurrently; more are queued."""
        self.max_concurrent = max_concurrent
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

    def set_in_flight(self, count: int) -> None:
        """Record the number of responses in flight. Thread-safe."""
        with self._lock:
            self._add_load()
            self._in_flight = count if self.max_concurrent is None else min(count, self.max_concurrent)
            self._max_in_flight = max(self._max_in_flight, self._in_flight)

    def step(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """End a step and return its metrics. `seconds`: durations of its phases. The utilization of the rollout is
        measured since the end of the previous step."""
        with self._lock:
            self._add_load()
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
        """Return the idle shares over all steps so far; None before the first step has ended."""
        if not self._trained_s:
            return None
        return IdleShares(self._waited_s / self._trained_s, self._unused(self._load_s, self._elapsed_s))

    @property
    def was_full(self) -> bool:
        """Whether `max_concurrent` responses were in flight at some time."""
        return self.max_concurrent is not None and self._max_in_flight >= self.max_concurrent

    def _add_load(self) -> None:
        """Add the load since the last call. The caller holds the lock."""
        now = self._clock()
        self._step_load_s += self._in_flight * (now - self._changed_at)
        self._changed_at = now

    def _unused(self, load_s: float, elapsed: float) -> float:
        return 1.0 - load_s / max(self._max_in_flight * elapsed, 1e-9) if self._max_in_flight else 1.0


def tuning_advice(idle: IdleShares, run: AsyncSetup) -> str:
    """Return one line for the log: the idle shares, the likely bottleneck, and keys that would help."""
    shares = f"trainer idle {idle.trainer:.0%} (waiting for responses), rollout idle {idle.rollout:.0%}"
    if idle.trainer < _NEGLIGIBLE and idle.rollout < _NEGLIGIBLE:
        return f"{shares}: little is left to gain"
    if idle.trainer < max(_NEGLIGIBLE, _TRAINING_LIMITS * idle.rollout):
        return f"{shares}: training limits the run; what helps: {_faster_training(run)}"
    if idle.rollout < max(_NEGLIGIBLE, _GENERATION_LIMITS * idle.trainer):
        return f"{shares}: generation limits the run; what helps: {_faster_generation(run)}, or shorter responses"
    if run.evenness > _EVEN and not run.own_devices:
        lengths = f"the mean response is {run.evenness:.0%} as long as the longest of its batch"
        return f"{shares}; {lengths}, so generation in advance gains little; what helps: trainer.mode=sync"
    if not run.partial_rollout:
        key = "trainer.mode=async" if run.mode == "one_step_off" else "trainer.partial_rollout=True"
        return f"{shares}: both wait for the last responses before a weight sync; what helps: {key}"
    if run.trained_staleness >= run.max_staleness:
        key = f"trainer.max_staleness={run.max_staleness + 1}"
        return f"{shares}: both wait for the longest responses; what helps: {key}"
    # The staleness limit was never reached: a larger one would have no effect.
    remedy = _faster_training(run) if run.own_devices else _faster_generation(run)
    return f"{shares}: the trainer waits for the last responses of a batch; what helps: {remedy}"


def _faster_training(run: AsyncSetup) -> str:
    if run.own_devices:
        return f"move devices to the trainer (trainer.n_gpus_per_node up, {ROLLOUT}.n_gpus_per_node down)"
    return f"a faster update (larger {ACTOR}.ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu)"


def _faster_generation(run: AsyncSetup) -> str:
    if run.limited_by_loops:
        return f"more concurrent trajectories ({ROLLOUT}.agent.max_concurrent_requests=null, which is automatic)"
    if run.own_devices:
        return f"more rollout devices ({ROLLOUT}.n_gpus_per_node, {ROLLOUT}.nnodes)"
    return f"more concurrent responses ({ROLLOUT}.gpu_memory_utilization, {ROLLOUT}.max_num_seqs)"


class InFlight:
    """Names of the trajectories in flight, with a callback; thread-safe. Removing a name twice has no effect: a
    collector thread may report a trajectory as finished while the trainer drops its group."""

    def __init__(self, on_change: Callable[[int], None]) -> None:
        """`on_change` receives the number of names after every change, under the lock."""
        self._names: set[str] = set()
        self._on_change: Callable[[int], None] | None = on_change
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._names)

    def add(self, names: Iterable[str]) -> None:
        """Add submitted trajectories."""
        with self._lock:
            self._names.update(names)
            self._report()

    def remove(self, names: Iterable[str]) -> None:
        """Remove trajectories that finished or were dropped; unknown names are ignored."""
        with self._lock:
            self._names.difference_update(names)
            self._report()

    def close(self) -> None:
        """Stop calling `on_change`: collector threads of a closed job must not change the count of the next one."""
        with self._lock:
            self._on_change = None

    def _report(self) -> None:
        if self._on_change is not None:
            self._on_change(len(self._names))
