"""Input and output of the health rules: `load` returns the RunTables of a recording; a rule returns a Finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.recording.reader import Recording

_MAX_GROUP_STEPS = 80
_MAX_TEXTS = 96
# Name prefixes of the metrics that rules read.
_METRICS = (
    "actor/",
    "critic/score/",
    "kl/",
    "perf/mfu",
    "response_length/",
    "reward/",
    "rollout",
    "timing_s/",
    "train/",
    "val",
)
STEADY = 3
"""Consecutive steps in which a condition must hold."""
BASELINE = 5
"""Steps at the beginning that later ones are compared with."""

Level: TypeAlias = Literal["alert", "warning"]


@dataclass
class RunTables:
    """Input of the rules. Columns are arrays with NaN for missing values; all may be empty."""

    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    """`step`, `time` and a column per metric."""
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    """By recorded step: `step`, `no_signal` (share of groups whose responses have the same score), `all_best` (share
    of groups whose responses all have the best score of the step), `failed` (share of responses of agents that
    failed)."""
    engines: Mapping[str, np.ndarray] = field(default_factory=dict)
    """`kv_used`, `waiting` and `preemptions` of the newest records."""
    devices: Mapping[str, np.ndarray] = field(default_factory=dict)
    """`utilization` of the newest records."""
    events: Sequence[Mapping[str, Any]] = ()
    first_texts: Sequence[str] = ()
    last_texts: Sequence[str] = ()
    """Responses of the first and of the newest recorded step."""
    config: Mapping[str, Any] = field(default_factory=dict)
    now: float | None = None

    @property
    def last_step(self) -> int:
        steps = self.metrics.get("step", np.array([]))
        return int(steps[-1]) if len(steps) else 0

    def column(self, *names: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the first of these metrics that was recorded, without missing values."""
        for name in names:
            if name in self.metrics:
                values = self.metrics[name]
                known = ~np.isnan(values)
                return self.metrics["step"][known], values[known]
        return np.array([]), np.array([])

    def setting(self, key: str, default: Any) -> Any:
        """A value of the configuration by its full key."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value


Cache: TypeAlias = dict[tuple[str, int, int], Any]
"""Values read from the file of a step, by (kind of value, step, version of the file)."""


def load(run: Recording, now: float | None = None, cache: Cache | None = None) -> RunTables:
    """Read what the rules need: metrics, events, and samples of the large streams.

    `cache`: kept by the caller between calls; steps in it are not read again.
    """
    cache = {} if cache is None else cache
    names = [name for name in run.metrics.names if name.startswith(_METRICS)]
    metrics = run.metrics.table(["step", "time", *names])
    columns = {name: metrics[name].to_numpy().astype(np.float64) for name in metrics.column_names}
    texts = run.trajectories.steps if run.run.get("texts") else []
    return RunTables(
        metrics=columns,
        groups=_group_columns(run, cache),
        engines=_newest(run.engines.table(), ("kv_used", "waiting", "preemptions")),
        devices=_newest(run.devices.table(), ("utilization",)),
        events=run.events.table().to_pylist(),
        first_texts=_texts(run, texts[0], cache) if len(texts) > 1 else (),
        last_texts=_texts(run, texts[-1], cache) if len(texts) > 1 else (),
        config=run.run.get("config") or {},
        now=now,
    )


def _newest(table: pa.Table, names: tuple[str, ...], count: int = 400) -> dict[str, np.ndarray]:
    table = table.slice(max(0, len(table) - count))
    return {name: table[name].to_numpy().astype(np.float64) for name in names}


def _texts(run: Recording, step: int, cache: Cache) -> tuple[str, ...]:
    key = ("texts", step, run.trajectories.version(step))
    if key not in cache:
        kept = min([step, *(old[1] for old in cache if old[0] == "texts")])  # texts are large: keep only the first
        for old in [old for old in cache if old[0] == "texts" and old[1] > kept]:
            del cache[old]
        cache[key] = tuple(_read_texts(run, step))
    texts: tuple[str, ...] = cache[key]
    return texts


def _read_texts(run: Recording, step: int) -> list[str]:
    turns = run.trajectories.table(["turns"], step=step)["turns"].slice(0, _MAX_TEXTS).to_pylist()
    return [" ".join(t["text"] or "" for t in response or () if t["source"] == "model") for response in turns]


def _group_columns(run: Recording, cache: Cache) -> dict[str, np.ndarray]:
    """Shares of groups by step, for the newest steps and evenly spaced earlier ones."""
    steps = run.groups.steps
    half = _MAX_GROUP_STEPS // 2
    if len(steps) > _MAX_GROUP_STEPS:
        earlier = np.linspace(0, len(steps) - half - 1, half).astype(int)
        steps = [steps[index] for index in np.unique(earlier)] + steps[-half:]
    rows = []
    for step in steps:
        key = ("groups", step, run.groups.version(step))
        if key not in cache:
            cache[key] = _group_shares(run, step)
        rows.append(cache[key])
    names = ("no_signal", "all_best", "failed")
    columns = {name: np.array([row[number] for row in rows], np.float64) for number, name in enumerate(names)}
    return {"step": np.array(steps, np.int64), **columns}


def _group_shares(run: Recording, step: int) -> tuple[float, float, float]:
    table = run.groups.table(["score_mean", "score_std", "statuses", "samples"], step=step)
    several = pc.greater(pc.list_value_length(table["samples"]), 1).to_numpy()
    std, mean = (table[name].to_numpy().astype(np.float64) for name in ("score_std", "score_mean"))
    equal = (std == 0) & several
    best = equal & (mean >= np.nanmax(mean, initial=-np.inf))
    statuses = pc.list_flatten(table["statuses"])
    failed = pc.sum(pc.equal(statuses, "failed")).as_py() or 0
    rows = max(1, int(several.sum()))
    return float(equal.sum() / rows), float(best.sum() / rows), failed / max(1, len(statuses))


class Finding(NamedTuple):
    """A problem of a run. `settings`: configuration keys with the values that the remedy suggests."""

    rule: str
    level: Level
    title: str
    figure: str
    """The measured values, as a sentence."""
    remedy: str
    settings: list[tuple[str, str]]
    first_step: int
    last_step: int
    is_current: bool
    """Whether the condition held until the newest step or the one before."""
    metric: str | None = None
    """Metric that shows the problem."""


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
