"""Summary of a run, for its end and for `verl summary`: what improved, where the time went, and how to use less of it.

ModeTimes estimates how long a step would have taken in the other mode of `trainer.mode` (sync, async), from phases and
response lengths. Assumption: a decode step takes equally long for any number of responses. Synchronous generation then
takes as long as its longest response. Asynchronous generation keeps the engine full and takes as long as the mean
response, but has to generate the longest one within `max_staleness` + 1 steps. Other costs and the devices are the
same.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl.config.schema import get_path
from verl.utils.console import (
    AFTER_STEP,
    PHASE_NAMES,
    format_duration,
    format_value,
    phase_seconds,
    validation_scores,
)

ASSUMPTION = "assuming that a decode step takes equally long for any number of responses"
_GENERATION_SECONDS, _STEP_SECONDS = "timing_s/gen", "timing_s/step"
_MEAN_LENGTH, _MAX_LENGTH = "response_length/mean", "response_length/max"
_ROLLOUT_IDLE = "rollouter/idle_ratio"

METRICS_FILE, CONFIG_FILE = "metrics.jsonl", "config.json"
TOOL_SHARE = "agent_loop/tool_share"
"""Metric: share of the agents' time that they spend in tools."""
# Metrics whose change is reported, and whether larger values are better.
_CURVES = {
    "reward/mean": ("reward_mean", True),
    "train/loss": ("train_loss", False),
    "val/loss": ("val_loss", False),
    "train/accuracy": ("train_accuracy", True),
    "val/accuracy": ("val_accuracy", True),
}
# Name of a step's time if none of its phases was timed.
_WHOLE_STEP = "training"
# Name of the time between steps: data loading, logging.
_BETWEEN_STEPS = "between steps"
# A time between two steps that is longer than these seconds and this multiple of a step is an interruption of the run.
_INTERRUPTION_S, _INTERRUPTION_STEPS = 60.0, 5.0
# Phases below this share of the time are not listed.
_MIN_SHARE = 0.01
# The slowest step is listed if it takes more than this multiple of the median.
_SLOW_STEP = 2.0
# Name of a phase on the console -> name in metrics.
_METRIC_NAMES = {name: key for key, name in PHASE_NAMES.items()}


@dataclass(frozen=True)
class _Hint:
    """A change that makes a phase faster."""

    text: str
    only_if: tuple[str, Any] | None = None
    """(key, value) of the configurations that it applies to; None: all."""

    def applies(self, config: Any) -> bool:
        """Return whether the hint applies to a configuration; True if that is unknown."""
        if config is None or self.only_if is None:
            return True
        key, value = self.only_if
        try:
            return get_path(config, key) == value
        except (KeyError, TypeError):  # stored by another version
            return True


def _larger_batches(block: str, size: str, tokens: str, dynamic: str = "use_dynamic_bsz") -> tuple[_Hint, ...]:
    """Return hints for larger micro-batches: in tokens with dynamic batch sizes, else in samples."""
    keys = ((tokens, True), (size, False))
    return tuple(_Hint(f"a larger {block}.{key}", (f"{block}.{dynamic}", value)) for key, value in keys)


def _no_checkpointing(model: str) -> _Hint:
    key = f"{model}.enable_gradient_checkpointing"
    return _Hint(f"no gradient checkpointing if memory suffices ({key}=False)", (key, True))


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_UPDATE = ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
_FORWARD = ("forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")
_LOG_PROB = ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz")
# Hints for the phase that takes most of the time, by its name in metrics.
_HINTS: dict[str, tuple[_Hint, ...]] = {
    "gen": (
        _Hint("shorter responses (data.max_response_length)"),
        _Hint(f"a larger {_ROLLOUT}.gpu_memory_utilization", ("trainer.device", "cuda")),
    ),
    "reward": (
        _Hint("a faster reward function"),
        _Hint("more scorers (reward_model.reward_kwargs.num_processes)"),
    ),
    "ref": (
        _Hint("no KL (use_kl_loss, use_kl_in_reward)"),
        *_larger_batches("actor_rollout_ref.ref", *_LOG_PROB),
    ),
    "teacher": (
        *_larger_batches("distillation.teacher", *_LOG_PROB),
        _Hint("a pool of their own (role_mapping)"),
    ),
    "old_log_prob": _larger_batches(_ROLLOUT, *_LOG_PROB),
    "values": _larger_batches("critic", *_FORWARD),
    "update_actor": (*_larger_batches(_ACTOR, *_UPDATE), _no_checkpointing("actor_rollout_ref.model")),
    "update_critic": (
        *_larger_batches("critic", *_UPDATE),
        _no_checkpointing("critic.model"),
        _Hint("an estimator without a critic (grpo)"),
    ),
    "testing": (
        _Hint("a larger trainer.test_freq"),
        _Hint("fewer validation rows (data.val_max_samples)"),
    ),
    "save_checkpoint": (_Hint("a larger trainer.save_freq"),),
}
# Hint for generation in which agents wait more for tools than for the model.
_TOOL_HINT = (
    "faster tools, more concurrent conversations (a larger actor_rollout_ref.rollout.agent.max_concurrent_requests), a"
    " shorter actor_rollout_ref.rollout.multi_turn.tool_timeout"
)


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
    """Sums over the steps of a run except the first, which includes compilation. Times are in seconds."""

    steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    """Time of the phase gen: the generation of a synchronous run, the trainer's waits for responses of an asynchronous
    one."""
    busy: float = 0.0
    """Asynchronous runs whose generation overlaps training: the seconds that it would take at full capacity."""
    mean_length: float = 0.0
    """Sum of the mean response lengths of the steps."""
    longest: float = 0.0
    """Sum of the maximum response lengths of the steps."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step; steps without response lengths are left out."""
        required = (_GENERATION_SECONDS, _STEP_SECONDS, _MEAN_LENGTH, _MAX_LENGTH)
        if any(key not in metrics for key in required) or not metrics[_MAX_LENGTH]:
            return
        self.steps += 1
        self.seconds += float(metrics[_STEP_SECONDS])
        self.waiting += float(metrics[_GENERATION_SECONDS])
        self.busy += float(metrics[_STEP_SECONDS]) * (1.0 - float(metrics.get(_ROLLOUT_IDLE, 0.0)))
        self.mean_length += float(metrics[_MEAN_LENGTH])
        self.longest += float(metrics[_MAX_LENGTH])

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
    """Estimate the seconds of a step of an asynchronous run from those of a synchronous run on the same devices.

    They train and generate in turn. `evenness`: mean response length divided by the longest.
    """
    return step - generation * (1.0 - _async_share(evenness, max_staleness))


def sync_step_seconds(
    step: float, waiting: float, evenness: float, max_staleness: int, busy: float | None = None
) -> float:
    """Estimate the seconds of a step of a synchronous run from those of an asynchronous run.

    `evenness`: see `async_step_seconds`. `busy`: seconds of generation per step if it overlaps training; None: it runs
    only while training waits.
    """
    generation = waiting if busy is None else max(waiting, busy)
    return step - waiting + generation / _async_share(evenness, max_staleness)


def _async_share(evenness: float, max_staleness: int) -> float:
    """Return the generation time of an asynchronous step divided by that of a synchronous one: mean instead of longest
    response, but the longest one must be generated within `max_staleness` + 1 steps."""
    return max(evenness, 1.0 / (max_staleness + 1))


@dataclass
class Curve:
    """First, last and best value of a metric."""

    larger_is_better: bool
    first: float
    last: float
    best: float
    best_step: int

    def add(self, value: float, step: int) -> None:
        """Add the value of a later step."""
        self.last = value
        if value > self.best if self.larger_is_better else value < self.best:
            self.best, self.best_step = value, step

    def render(self) -> str:
        """Return `0.03 -> 0.35, best 0.4 at step 50`."""
        best = "" if self.best == self.last else f", best {format_value(self.best)} at step {self.best_step}"
        return f"{format_value(self.first)} -> {format_value(self.last)}{best}"


@dataclass
class RunSummary:
    """Summary of the metrics of the steps so far. Stores two numbers per step and totals, not the metrics."""

    curves: dict[str, Curve] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, under the names of the console."""
    first_step: dict[str, float] = field(default_factory=dict)
    """`seconds` of the first step, which includes compilation."""
    step_seconds: dict[int, float] = field(default_factory=dict)
    """Seconds of each step."""
    tokens: float = 0.0
    """Tokens of all steps."""
    waiting_for_one_rank: float = 0.0
    """Seconds in which all other ranks waited for the slowest one."""
    tool_shares: list[float] = field(default_factory=list)
    """`TOOL_SHARE` of each step with agents."""
    mode_times: ModeTimes = field(default_factory=ModeTimes)
    """For the estimate of the other mode of `trainer.mode`; without the first step."""
    last_time: float | None = None
    """Time at which the metrics of the last step were logged."""

    def add(self, step: int, metrics: Mapping[str, Any], logged_at: float) -> None:
        """Add the metrics of a step. `logged_at`: seconds of a clock that is the same for all steps."""
        previous, self.last_time = self.last_time, logged_at
        for name, (value, larger_is_better) in _curve_values(metrics).items():
            if not math.isfinite(value):
                continue
            if name in self.curves:
                self.curves[name].add(value, step)
            else:
                self.curves[name] = Curve(larger_is_better, value, value, value, step)
        if "timing_s/step" not in metrics:
            return
        self.step_seconds[step] = float(metrics["timing_s/step"])
        phases = phase_seconds(metrics) or {_WHOLE_STEP: self.step_seconds[step]}
        phases |= {PHASE_NAMES.get(name, name): float(metrics.get(f"timing_s/{name}", 0.0)) for name in AFTER_STEP}
        if previous is not None:
            between = logged_at - previous - sum(phases.values())
            if 0 < between < max(_INTERRUPTION_S, _INTERRUPTION_STEPS * sum(phases.values())):
                phases[_BETWEEN_STEPS] = between
        for name, seconds in phases.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if len(self.step_seconds) == 1:
            self.first_step = phases
        else:
            self.mode_times.add(metrics)
        self.tokens += float(metrics.get("perf/total_num_tokens", 0.0))
        self.waiting_for_one_rank += float(metrics.get("timing_s/waiting_for_one_rank", 0.0))
        if TOOL_SHARE in metrics:
            self.tool_shares.append(float(metrics[TOOL_SHARE]))

    def by_duration(self) -> dict[str, float]:
        """Return `seconds`, the longest first."""
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))

    def bottleneck(self, names: Mapping[str, str] = MappingProxyType({}), config: Any = None) -> str:
        """Return one line: the phase that took most of the time after the first step, and hints. Arguments: see
        `describe_bottleneck`."""
        first = self.first_step if len(self.step_seconds) > 1 else {}
        later = {name: value - first.get(name, 0.0) for name, value in self.seconds.items()}
        named = {name: value for name, value in later.items() if name not in ("other", _BETWEEN_STEPS)}
        seconds = {_METRIC_NAMES.get(name, name): value for name, value in named.items()}
        tool_share = sum(self.tool_shares) / max(1, len(self.tool_shares))
        text = describe_bottleneck(seconds, tool_share, names, config)
        return f"after the first step, {text}" if first else text

    def other_mode(self, config: Any) -> str | None:
        """Return a line with the estimated time of a step in the other `trainer.mode`; None if there is no estimate.

        There is none for agents with tools, whose time does not depend on response lengths alone.
        """
        settings = None if config is None else ModeSettings.from_config(config)
        return None if settings is None or any(self.tool_shares) else self.mode_times.render(settings)

    def render(self, config: Any = None) -> str:
        """Return the lines of the summary. `config`: the configuration of an RL run or its plain values, if known."""
        total, count = sum(self.seconds.values()), len(self.step_seconds)
        lines = [f"Summary: {count} step{'s' * (count != 1)} in {format_duration(total)}"]
        width = max(map(len, [*self.curves, "tokens/s"]))
        lines += [f"  {name:<{width}}  {curve.render()}" for name, curve in self.curves.items()]
        in_steps = sum(self.step_seconds.values())
        if self.tokens and in_steps:
            lines.append(f"  {'tokens/s':<{width}}  {self.tokens / in_steps:.0f} in steps")
        lines += self._time_lines(total, config)
        if (estimate := self.other_mode(config)) is not None:
            lines.append(f"  {estimate}")
        return "\n".join(lines)

    def _time_lines(self, total: float, config: Any) -> list[str]:
        """Return the table of phases, slow steps and ranks, and the bottleneck. `total`: seconds of all phases."""
        if not self.step_seconds or total <= 0:
            return []
        lines, count = ["  phase             seconds  share  per step"], len(self.step_seconds)
        for name, seconds in self.by_duration().items():
            if seconds >= _MIN_SHARE * total:
                lines.append(f"  {name:<16}  {seconds:>7.1f}  {seconds / total:>5.0%}  {seconds / count:>8.2f}")
        slowest, median = max(self.step_seconds, key=lambda step: self.step_seconds[step]), self._median()
        if self.step_seconds[slowest] > _SLOW_STEP * median:
            longest = format_duration(self.step_seconds[slowest])
            lines.append(f"  slowest step: {slowest} with {longest} (median {format_duration(median)})")
        if self.waiting_for_one_rank > _MIN_SHARE * total:
            lines.append(f"  waiting for one slow rank: {format_duration(self.waiting_for_one_rank)}")
        if _WHOLE_STEP not in self.seconds:
            lines.append(f"  {self.bottleneck(PHASE_NAMES, config)}")
        return lines

    def _median(self) -> float:
        return statistics.median(self.step_seconds.values())


def describe_bottleneck(
    seconds: Mapping[str, float],
    tool_share: float = 0.0,
    names: Mapping[str, str] = MappingProxyType({}),
    config: Any = None,
) -> str:
    """Return one line: the phase that takes most of the time, and hints.

    `seconds`: by name of the phase in metrics. `tool_share`: share of the agents' time that they spend in tools.
    `names`: other names for phases in the text. `config`: the configuration of the run or its plain values, which
    excludes hints; None: unknown.
    """
    phases = {name: value for name, value in seconds.items() if name != "step"}
    total = sum(phases.values())
    if total <= 0:
        return "no step was timed"
    name = max(phases, key=lambda phase: phases[phase])
    in_tools = name == "gen" and tool_share > 0.5
    hints = _TOOL_HINT if in_tools else ", ".join(hint.text for hint in _HINTS.get(name, ()) if hint.applies(config))
    share = f"{names.get(name, name)} took {phases[name] / total:.0%} of the time"
    return (
        share + (f", {tool_share:.0%} of it in tools" if in_tools else "") + (f"; what helps: {hints}" if hints else "")
    )


def _curve_values(metrics: Mapping[str, Any]) -> dict[str, tuple[float, bool]]:
    """Return the value of each reported metric by its name on the console, and whether larger is better."""
    values = {name: (float(metrics[key]), larger) for key, (name, larger) in _CURVES.items() if key in metrics}
    return values | {name: (value, True) for name, value in validation_scores(metrics).items()}


def read_summary(file: Path) -> RunSummary:
    """Return the summary of a `metrics.jsonl`. Lines that are not complete records are ignored."""
    summary = RunSummary()
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            step, logged_at, data = int(record["step"]), float(record["time"]), dict(record["data"])
        except (ValueError, KeyError, TypeError):
            continue
        summary.add(step, {key: _number(value) for key, value in data.items()}, logged_at)
    return summary


def _number(value: Any) -> Any:
    """Return the value of a metric in the file, where non-finite numbers are strings."""
    return float(value) if value in ("nan", "inf", "-inf") else value
