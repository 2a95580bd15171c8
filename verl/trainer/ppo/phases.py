"""Phases of a step: `with phases("update_actor"):` adds its seconds, notes its peak memory and tells the console."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verl.trainer.ppo.console import Console


class Phases:
    """Seconds and, on GPUs, peak memory per phase of one training step."""

    def __init__(self, console: Console, peak_memory: Callable[[], float] | None = None) -> None:
        self._console = console
        self._peak_memory = peak_memory
        self.seconds: dict[str, float] = {}
        self.memory_gb: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase; nested phases each count their own whole time."""
        start = time.perf_counter()
        try:
            with self._console.phase(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        if self._peak_memory is not None:
            self.memory_gb[name] = max(self.memory_gb.get(name, 0.0), self._peak_memory())


def bottleneck(seconds: dict[str, float], step_seconds: float) -> tuple[str, float]:
    """The phase that took most of the step, and its share."""
    phases = {name: value for name, value in seconds.items() if name not in ("step",)}
    if not phases or step_seconds <= 0:
        return "", 0.0
    name = max(phases, key=lambda phase: phases[phase])
    return name, phases[name] / step_seconds
