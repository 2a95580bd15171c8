"""Finding: a problem of a run that a health rule reports; helpers of the rules."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from verl.recording.health.run_tables import RunTables

__all__ = ["BASELINE", "STEADY", "Finding", "Level", "finding", "period_of", "share_of_step"]

STEADY = 3
"""Consecutive steps in which a condition must hold."""
BASELINE = 5
"""Steps at the beginning that later ones are compared with."""

Level: TypeAlias = Literal["alert", "warning"]


class Finding(NamedTuple):
    """A problem of a run. `settings`: keys with values that would help."""

    rule: str
    level: Level
    title: str
    figure: str
    remedy: str
    settings: list[tuple[str, str]]
    first_step: int
    last_step: int
    is_current: bool
    """Whether it held until the newest step."""
    metric: str | None = None
    """Metric that shows it."""


def period_of(steps: np.ndarray, condition: np.ndarray, length: int = STEADY) -> tuple[int, int] | None:
    """First and last step of the newest period in which the condition held for at least `length` recorded steps."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], condition.astype(int), [0]])))
    periods = [(start, end - 1) for start, end in edges.reshape(-1, 2) if end - start >= length]
    return (int(steps[periods[-1][0]]), int(steps[periods[-1][1]])) if periods else None


def finding(
    run: RunTables,
    rule: str,
    level: Level,
    title: str,
    period: tuple[int, int],
    figure: str,
    remedy: str,
    settings: list[tuple[str, str]],
    metric: str | None,
) -> Finding:
    is_current = period[1] >= run.last_step - 1
    changed = [(key, value) for key, value in settings if str(run.setting(key, None)) != value]
    return Finding(rule, level, title, figure, remedy, changed, *period, is_current, metric)


def share_of_step(run: RunTables, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Share of the step that a phase takes, and the steps."""
    if name not in run.metrics or "timing_s/step" not in run.metrics:
        return np.array([]), np.array([])
    share = run.metrics[name] / np.maximum(run.metrics["timing_s/step"], 1e-9)
    known = ~np.isnan(share)
    return share[known], run.metrics["step"][known]
