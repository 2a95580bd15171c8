"""The largest batch, sequence length and model with which a run fits into memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.layout import layout_of
from verl.config.ppo import PPOConfig
from verl.config.problems import ConfigError
from verl.config.schema import get_path
from verl.planning.advice import MemoryChange, cheapest_changes
from verl.planning.known_models import KNOWN_MODELS, known_shape
from verl.planning.phases import MemoryPlan
from verl.planning.shapes import ModelShape

_LENGTH_STEP, _TOKEN_STEP = 64, 512
Load = Callable[[Sequence[str]], Any]
"""Returns the configuration with these overrides in addition; raises ConfigError."""


@dataclass(frozen=True)
class LargestValue:
    """The largest value of a key that fits; `value` None: not even the smallest one. `limit`: the largest that was
    tried, and why no larger one."""

    key: str
    now: int
    value: int | None
    limit: int
    reason: str


@dataclass(frozen=True)
class LargestModel:
    """The largest known model that fits: with the settings of the run, and with `changes`; None: none does."""

    as_configured: str | None
    with_changes: str | None
    changes: tuple[MemoryChange, ...]
    tried: tuple[str, ...]


def largest_batch(config: Any, load: Load, plan_of: Callable[[Any], MemoryPlan]) -> LargestValue:
    """Return the largest micro-batch of the update: in tokens with dynamic batch sizes, else in samples."""
    if isinstance(config, PPOConfig):
        block, dp = "actor_rollout_ref.actor", layout_of(config, "actor").dp_size
        actor = config.actor_rollout_ref.actor
        rows = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // dp
        longest = config.data.max_prompt_length + config.data.max_response_length
        dynamic, names = actor.use_dynamic_bsz, ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
    else:
        block, rows, longest = "data", config.rows_per_step // config.dp_size, config.data.max_length
        dynamic, names = config.data.use_dynamic_bsz, ("micro_batch_size_per_gpu", "max_token_len_per_gpu")
    key = f"{block}.{names[dynamic]}"
    if dynamic:
        values = [*range(_round_up(longest, _TOKEN_STEP), rows * longest, _TOKEN_STEP), rows * longest]
    else:
        values = [size for size in range(1, rows + 1) if rows % size == 0]
    return _largest(key, get_path(config, key), values, load, plan_of, "the samples of a mini-batch on one rank")


def largest_length(
    config: Any, positions: int | None, load: Load, plan_of: Callable[[Any], MemoryPlan]
) -> LargestValue:
    """Return the longest response (of supervised runs: row); `positions`: context of the model, None: unknown."""
    context = positions or 2**17
    if isinstance(config, PPOConfig):
        key, limit = "data.max_response_length", context - config.data.max_prompt_length
    else:
        key, limit = "data.max_length", context
    now = get_path(config, key)
    values = sorted({*range(_LENGTH_STEP, limit + 1, _LENGTH_STEP), limit, min(now, limit)})
    reason = f"the context of {context} tokens" if positions else "the lengths that are tried"
    return _largest(key, now, values, load, plan_of, reason)


def _largest(
    key: str, now: int, values: Sequence[int], load: Load, plan_of: Callable[[Any], MemoryPlan], reason: str
) -> LargestValue:
    """Search `values` (ascending) by bisection: memory grows with the value."""

    def fits(value: int) -> bool:
        try:
            return not plan_of(load([f"{key}={value}"])).excess
        except (ConfigError, ValueError):
            return False

    low, high = -1, len(values) - 1  # values[low] fits, values above high do not
    if not values:
        return LargestValue(key, now, None, now, "no valid value")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(values[middle]) else (low, middle - 1)
    if low < 0:
        return LargestValue(key, now, None, values[-1], reason)
    if low + 1 < len(values):
        try:
            load([f"{key}={values[low + 1]}"])
        except ConfigError as error:  # not memory, but another key limits the value
            return LargestValue(key, now, values[low], values[low], error.problems[0].key)
    return LargestValue(key, now, values[low], values[-1], reason)


def largest_model(
    config: Any,
    shapes: Mapping[str, ModelShape],
    replaced: Mapping[str, tuple[str, int]],
    plan_with: Callable[[Any, Mapping[str, ModelShape]], MemoryPlan],
) -> LargestModel:
    """Return the largest known model that fits in place of the models of the roles `replaced` (role -> (kind, LoRA
    rank)), as configured and with changes that do not affect the results of training."""
    changes_of: dict[str, list[MemoryChange]] = {}

    def shapes_of(name: str) -> dict[str, ModelShape]:
        return {**shapes, **{role: known_shape(name, kind, rank) for role, (kind, rank) in replaced.items()}}

    def fits(name: str) -> bool:
        return not plan_with(copy.deepcopy(config), shapes_of(name)).excess

    def fits_with_changes(name: str) -> bool:
        known = shapes_of(name)
        changes_of[name], success = cheapest_changes(
            config, lambda changed: plan_with(changed, known), lambda remedy: not remedy.changes_training
        )
        return success

    as_configured = _largest_that(fits, KNOWN_MODELS)
    start = KNOWN_MODELS.index(as_configured) + 1 if as_configured else 0
    larger = _largest_that(fits_with_changes, KNOWN_MODELS[start:])
    best = larger or as_configured
    return LargestModel(as_configured, best, tuple(changes_of.get(best or "", ())), KNOWN_MODELS)


def _largest_that(fits: Callable[[str], bool], names: Sequence[str]) -> str | None:
    """Return the last name that fits. Every name is tried: a layout may divide a large model but not a small one."""
    for name in reversed(names):
        try:
            if fits(name):
                return name
        except ConfigError:  # a layout that does not divide this model
            continue
    return None


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
