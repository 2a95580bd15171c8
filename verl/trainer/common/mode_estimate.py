"""What a run would have taken in the other mode of `trainer.mode`: estimated from its phases and response lengths.

The model: every decode step takes equally long, however many responses are decoded. A synchronous generation then
takes as long as its longest response; an asynchronous one keeps the engine full and takes as long as the mean response,
but generates the longest one within `max_staleness` + 1 steps. Other costs and devices are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ASSUMPTION = "assuming that a decode step takes equally long for any number of responses"
_GENERATION, _STEP = "timing_s/gen", "timing_s/step"
_MEAN, _LONGEST = "response_length/mean", "response_length/max"
_ROLLOUT_IDLE = "rollouter/idle_ratio"


@dataclass(frozen=True)
class ModeSettings:
    """The settings of a run that the estimate depends on."""

    mode: str
    max_staleness: int
    overlaps: bool
    """Asynchronous modes: generation continues during updates, on devices of its own or with `trainer.overlap`."""

    @classmethod
    def from_config(cls, config: Any) -> ModeSettings | None:
        """Return the settings of a resolved configuration or its plain values; None if it has no `trainer.mode`."""
        if "trainer" not in config or "mode" not in config["trainer"]:
            return None
        trainer = config["trainer"]
        roles = config["role_mapping"] if "role_mapping" in config else {"actor": "", "rollout": ""}
        apart = roles["actor"] != roles["rollout"]
        staleness = 1 if trainer["mode"] == "one_step_off" else int(trainer["max_staleness"])
        return cls(trainer["mode"], staleness, apart or bool(trainer["overlap"]))


@dataclass
class ModeTimes:
    """Sums over the steps of a run after the first, which includes compilation."""

    steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    """Generation of a synchronous run; of an asynchronous run, the trainer's waits for responses."""
    busy: float = 0.0
    """Asynchronous runs: seconds of generation at full capacity, if it overlaps training."""
    mean_length: float = 0.0
    longest: float = 0.0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step; steps without response lengths are left out."""
        if any(key not in metrics for key in (_GENERATION, _STEP, _MEAN, _LONGEST)) or not metrics[_LONGEST]:
            return
        self.steps += 1
        self.seconds += float(metrics[_STEP])
        self.waiting += float(metrics[_GENERATION])
        self.busy += float(metrics[_STEP]) * (1.0 - float(metrics.get(_ROLLOUT_IDLE, 0.0)))
        self.mean_length += float(metrics[_MEAN])
        self.longest += float(metrics[_LONGEST])

    def estimate(self, settings: ModeSettings) -> float | None:
        """Return the seconds of a step in the other mode: async for a synchronous run, else sync; None: unknown."""
        if not self.steps or not self.mean_length:
            return None
        step, waiting = self.seconds / self.steps, self.waiting / self.steps
        evenness = self.mean_length / self.longest
        if settings.mode == "sync":
            return async_step_seconds(step, waiting, evenness, settings.max_staleness)
        busy = self.busy / self.steps if settings.overlaps else None
        return sync_step_seconds(step, waiting, evenness, settings.max_staleness, busy)

    def render(self, settings: ModeSettings) -> str | None:
        """Return a line with the estimate; None if there is none."""
        estimate = self.estimate(settings)
        if estimate is None:
            return None
        step = self.seconds / self.steps
        other = f"async with max_staleness={settings.max_staleness}" if settings.mode == "sync" else "sync"
        return (
            f"trainer.mode={other} on the same devices: about {estimate:.2f} s per step after the first instead of"
            f" {step:.2f} ({step / estimate:.2f}x), {ASSUMPTION}"
        )


def async_step_seconds(step: float, generation: float, evenness: float, max_staleness: int) -> float:
    """Estimate the step of an asynchronous run on the same devices, which train and generate in turn, from a
    synchronous one. `evenness`: mean response length over the longest."""
    return step - generation * (1.0 - _async_share(evenness, max_staleness))


def sync_step_seconds(
    step: float, waiting: float, evenness: float, max_staleness: int, busy: float | None = None
) -> float:
    """Estimate the step of a synchronous run from an asynchronous one.

    `busy`: seconds of generation per step if it overlaps training; None: it runs only while training waits.
    """
    generation = waiting if busy is None else max(waiting, busy)
    return step - waiting + generation / _async_share(evenness, max_staleness)


def _async_share(evenness: float, max_staleness: int) -> float:
    """Return the generation of an asynchronous step as a share of that of a synchronous one: of mean instead of longest
    responses, but the longest one must be generated within `max_staleness` + 1 steps."""
    return max(evenness, 1.0 / (max_staleness + 1))
