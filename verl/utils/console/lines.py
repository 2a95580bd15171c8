"""Text of metrics for the console: one line per training step. Pure functions of the metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

LINE, FULL = "line", "full"
"""Values of `trainer.console`."""

# Phase names on the console where they differ from those in metrics.
PHASE_NAMES = {
    "gen": "rollout",
    "values": "compute_values",
    "update_actor": "train_actor",
    "update_critic": "train_critic",
    "testing": "validation",
}
# Phases after the step, which its seconds do not include.
AFTER_STEP = ("testing", "save_checkpoint")
# `timing_s/*` that is not the time of a phase.
_NO_PHASES = frozenset({"step", "waiting_for_one_rank", "record", *AFTER_STEP})

# The most important metrics, in this order, under the short names of the documentation.
HEADLINE = {
    "reward/mean": "reward_mean",
    "kl/mean": "kl",
    "actor/loss": "actor_loss",
    "critic/loss": "critic_loss",
    "train/loss": "train_loss",
    "val/loss": "val_loss",
    "val/accuracy": "val_accuracy",
}
_MORE = {"train/accuracy": "train_accuracy", "actor/entropy": "entropy", "train/grad_norm": "grad_norm"}
# Shown if not 0.
_PROBLEMS = {
    "reward/errors": "reward_errors",
    "actor/skipped_steps": "actor_updates_skipped",
    "critic/skipped_steps": "critic_updates_skipped",
    "train/skipped_steps": "updates_skipped",
}
_ACCURACY = re.compile(r"val/(?P<source>.+)/accuracy")
_CORE = re.compile(r"val-core/(?P<source>.+)/[^/]+/(mean@\d+)")
_MAX_SOURCES = 3
_MAX_OTHER = 8
_MAX_PHASES = 5


def step_line(metrics: Mapping[str, Any], step: int, eta: float | None = None, notes: Sequence[str] = ()) -> str:
    """Return `step N: reward_mean=…, … | 1.6 s (rollout 0.9, …) | 3011 tokens/s | ETA 15 s`.

    `eta`: seconds until the end of the run. `notes`: further texts for this step. Metrics without a place in the line
    appear only if the line would otherwise be empty.
    """
    parts = [_headline(metrics), *notes, _seconds_text(metrics), _speed(metrics)]
    parts = [part for part in parts if part]
    if not parts:
        parts = [", ".join(f"{key}={format_value(metrics[key])}" for key in sorted(metrics)[:_MAX_OTHER])]
    if eta is not None:
        parts.append(f"ETA {format_duration(eta, digits=0)}")
    return f"step {step}: " + " | ".join(parts)


def validation_scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the main score of each data source of a validation by its name on the console.

    The score is the accuracy; without one, the mean that `val-core` has. `val_accuracy(SOURCE)`, without the source if
    there is only one.
    """
    scores: dict[str, tuple[str, float]] = {}
    for name, pattern in (("val_accuracy", _ACCURACY), ("val_score", _CORE)):
        for key, value in metrics.items():
            match = pattern.fullmatch(key)
            if match is not None and isinstance(value, int | float):
                scores.setdefault(match["source"], (name, float(value)))
    if len(scores) == 1:
        return dict(scores.values())
    return {f"{name}({source})": value for source, (name, value) in scores.items()}


def phase_seconds(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the phases of a step by their names on the console, longest first; `other` is the
    remainder."""
    timed = {key.removeprefix("timing_s/"): float(metrics[key]) for key in metrics if key.startswith("timing_s/")}
    phases = {PHASE_NAMES.get(name, name): value for name, value in timed.items() if name not in _NO_PHASES}
    if phases and "step" in timed:
        phases["other"] = max(0.0, timed["step"] - sum(phases.values()))
    return dict(sorted(phases.items(), key=lambda item: -item[1]))


def format_value(value: Any) -> str:
    """Return a number with four digits; other values unchanged."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_duration(seconds: float, digits: int = 2) -> str:
    """Return a duration: `0.16 s`, `12.3 s`, `4 min 05 s`, `2 h 07 min`. `digits`: the most decimal places."""
    if seconds < 9.995:
        return f"{seconds:.{digits}f} s"
    if seconds < 99.95:
        return f"{seconds:.{min(digits, 1)}f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _headline(metrics: Mapping[str, Any]) -> str:
    entries = {short: metrics[key] for key, short in HEADLINE.items() if key in metrics}
    entries |= {short: metrics[key] for key, short in _MORE.items() if key in metrics}
    texts = [f"{name}={format_value(value)}" for name, value in entries.items()]
    if "response_length/mean" in metrics:
        cut = metrics.get("response_length/clip_ratio", 0.0)
        texts.append(f"length={metrics['response_length/mean']:.4g}" + (f" ({cut:.1%} cut)" if cut else ""))
    texts += _validation_texts(validation_scores(metrics))
    texts += [f"{short}={metrics[key]:g}" for key, short in _PROBLEMS.items() if metrics.get(key)]
    return ", ".join(texts)


def _validation_texts(scores: Mapping[str, float]) -> list[str]:
    if len(scores) > _MAX_SOURCES:
        mean = sum(scores.values()) / len(scores)
        return [f"val_mean={mean:.4g} ({len(scores)} sources)"]
    return [f"{name}={value:.4g}" for name, value in scores.items()]


def _seconds_text(metrics: Mapping[str, Any]) -> str:
    """Return the seconds of the step with its longest phases, and those of validation and save."""
    if "timing_s/step" not in metrics:
        return ""
    text = format_duration(metrics["timing_s/step"])
    phases = [(name, seconds) for name, seconds in phase_seconds(metrics).items() if name != "other"]
    if phases:
        shown, rest = phases[:_MAX_PHASES], metrics["timing_s/step"]
        rest -= sum(seconds for _, seconds in shown)
        shown = [*shown, ("other", max(0.0, rest))]
        text += " (" + ", ".join(f"{name} {_short(seconds)}" for name, seconds in shown) + ")"
    for name in AFTER_STEP:
        if f"timing_s/{name}" in metrics:
            text += f" + {PHASE_NAMES.get(name, name)} {format_duration(metrics[f'timing_s/{name}'])}"
    return text


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 9.995 else f"{seconds:.1f}"


def _speed(metrics: Mapping[str, Any]) -> str:
    tokens, seconds = metrics.get("perf/total_num_tokens"), metrics.get("perf/time_per_step")
    return f"{tokens / seconds:.0f} tokens/s" if tokens and seconds else ""
