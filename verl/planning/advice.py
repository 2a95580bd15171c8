"""Search for changes of a configuration that make its memory plan fit, the cheapest first; they are applied or listed
in an error. For `verl plan`: the largest batch, sequence length and model that fit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.config.layout import layout_of
from verl.config.load import root_of
from verl.config.ppo import PPOConfig
from verl.config.problems import ConfigError, Problem, Report
from verl.config.schema import Block, get_path, set_path
from verl.planning.catalog import KNOWN_MODELS, known_shape
from verl.planning.phases import GB, MemoryPlan
from verl.planning.remedies import UNKNOWN, Remedy, applicable_remedies, value_of
from verl.planning.shapes import ModelShape

# The plan may overestimate by this fraction, so a smaller excess is only a warning.
UNCERTAINTY = 0.07
# Changes that reduce the peak by a smaller fraction are ignored.
_MIN_REDUCTION = 0.005

# Differences between the values that are tried: sequence lengths and token budgets of micro-batches.
_LENGTH_STEP, _TOKEN_STEP = 64, 512

Planner = Callable[[Any], MemoryPlan]
"""Returns the memory plan of a configuration."""
Load = Callable[[Sequence[str]], Any]
"""Loads the configuration of the run with these additional overrides; raises ConfigError."""


@dataclass(frozen=True)
class MemoryChange:
    """A change of a key, and the total memory in bytes of the phase that it reduces."""

    remedy: Remedy
    before: Any
    value: Any
    phase: str
    total_before: float
    total_after: float

    @property
    def key(self) -> str:
        return self.remedy.key

    def __str__(self) -> str:
        return f"{self.key}={self.value} (now {self.before}): {self.phase} {self.total_after / GB:.1f} GB"

    def log_text(self) -> str:
        """Return the log message of an applied change."""
        memory = f"{self.phase} {self.total_before / GB:.1f} -> {self.total_after / GB:.1f} GB"
        return f"{self.key}: {self.before} -> {self.value} ({memory}; costs: {self.remedy.cost})"


def check_fits(config: Block, plan_of: Planner) -> list[str]:
    """Raise ConfigError if the plan exceeds the capacity by more than `UNCERTAINTY`; otherwise return warnings."""
    plan = plan_of(config)
    worst = plan.worst_phase
    if not worst.excess or worst.capacity is None:
        return []
    changes, fits = cheapest_changes(config, plan_of)
    needs = f"the {worst.phase} phase is planned to take {worst.total / GB:.1f} GB of {worst.location}'s"
    needs += f" {worst.capacity / GB:.1f} GB"
    if plan.installed is not None and plan.limited_by_host(worst):
        needs += f" of available host memory (the host has {plan.installed / GB:.1f} GB, of which other processes hold"
        needs += f" {plan.used_by_others / GB:.1f} GB)"
    advice = _advice(changes, fits, plan.fits_without_other_processes(worst))
    if worst.total * (1 - UNCERTAINTY) <= worst.capacity:
        return [f"Memory: {needs}. It may just fit. If it does not: {advice}."]
    key, value = next(
        ((change.key, change.before) for change in changes),
        ("trainer.n_gpus_per_node", get_path(config, "trainer.n_gpus_per_node")),
    )
    raise ConfigError([Problem(key, value, needs, advice[0].upper() + advice[1:])])


def apply_memory_settings(config: Any, plan_of: Planner) -> list[MemoryChange]:
    """Apply the changes that `trainer.auto_memory` allows to `config`, if they make the plan fit; return them."""
    auto_memory = config.trainer.auto_memory
    if auto_memory is False:
        return []
    return apply_cheapest_changes(config, plan_of, placement_only=auto_memory is None)


def apply_cheapest_changes(config: Block, plan_of: Planner, placement_only: bool = False) -> list[MemoryChange]:
    """Apply the cheapest changes that make the plan fit to `config`, and return them.

    If it cannot fit without changing the results of training, nothing is changed, and the list is empty.
    `placement_only`: change only where state is stored (offloading), and no key that the user has set.
    """
    set_by_user = getattr(config, "changed", {})

    def allowed(remedy: Remedy) -> bool:
        if placement_only and (not remedy.places_state or remedy.key in set_by_user):
            return False
        return not remedy.changes_training

    changes, fits = cheapest_changes(config, plan_of, allowed)
    for change in changes if fits else ():
        set_path(config, change.key, change.value)
    return changes if fits else []


def cheapest_changes(
    config: Block, plan_of: Planner, allowed: Callable[[Remedy], bool] = lambda remedy: True
) -> tuple[list[MemoryChange], bool]:
    """Return a minimal list of changes in the order of cost, and whether the plan fits with them.

    Until the plan fits, the cheapest remedy that reduces the worst phase and the excess of the plan is applied. Then
    changes that turned out to be unnecessary are reverted, the most expensive first.
    """
    trial = copy.deepcopy(config)
    changes: list[MemoryChange] = []
    plan = plan_of(trial)
    while plan.excess:
        tried = {change.key for change in changes}
        candidates = _candidate_changes(trial, plan, plan_of, allowed)
        change = next((candidate for candidate in candidates if candidate.key not in tried), None)
        if change is None:
            return changes, False
        set_path(trial, change.key, change.value)
        changes.append(change)
        plan = plan_of(trial)
    return _revert_unneeded(config, changes, plan_of), True


def _revert_unneeded(config: Block, changes: list[MemoryChange], plan_of: Planner) -> list[MemoryChange]:
    """Return the needed changes, each with the value closest to the original one that still fits."""
    values = {change.key: change.value for change in changes}
    for change in reversed(changes):
        for value in (change.before, *_allowed_values(config, change.remedy, change.before)):
            changed = _with_values(config, values | {change.key: value})
            plan = _plan_if_possible(changed, plan_of)
            if plan is not None and not plan.excess and _is_valid(changed):
                values[change.key] = value
                break
    needed: list[MemoryChange] = []
    current = config
    for change in changes:
        if values[change.key] != change.before:
            previous, current = current, _with_values(current, {change.key: values[change.key]})
            totals = (plan_of(step).phase(change.phase).total for step in (previous, current))
            needed.append(MemoryChange(change.remedy, change.before, values[change.key], change.phase, *totals))
    return needed


def _candidate_changes(
    config: Block, plan: MemoryPlan, plan_of: Planner, allowed: Callable[[Remedy], bool]
) -> Iterator[MemoryChange]:
    """Yield a change for each remedy of the worst phase: the smallest one with which the phase fits, or else the one
    with the lowest memory."""
    phase = plan.worst_phase
    for remedy, now in applicable_remedies(phase.phase, partial(value_of, config)):
        if now is UNKNOWN or not allowed(remedy):
            continue
        best: MemoryChange | None = None
        for value in _allowed_values(config, remedy, now):
            changed = _with_values(config, {remedy.key: value})
            new_plan = _plan_if_possible(changed, plan_of)
            if new_plan is None:
                continue
            new_phase = new_plan.phase(phase.phase)
            lowest = (best.total_after if best is not None else phase.total) * (1 - _MIN_REDUCTION)
            if new_phase.total < lowest and new_plan.excess < plan.excess and _is_valid(changed):
                best = MemoryChange(remedy, now, value, phase.phase, phase.total, new_phase.total)
            if not new_phase.excess:
                break
        if best is not None:
            yield best


def _plan_if_possible(config: Block, plan_of: Planner) -> MemoryPlan | None:
    """Return the plan; None if parallel sizes do not divide a model."""
    try:
        return plan_of(config)
    except ConfigError:
        return None


def _is_valid(config: Block) -> bool:
    report = Report()
    root_of(type(config)).validate(config, report)
    return not report.problems


def _with_values(config: Block, values: Mapping[str, Any]) -> Block:
    changed = copy.deepcopy(config)
    for key, value in values.items():
        set_path(changed, key, value)
    return changed


def _allowed_values(config: Block, remedy: Remedy, now: Any) -> Iterator[Any]:
    """Yield the values to try in order, from the one closest to `now`, within the limits that other keys set."""
    lowest, highest = 1, 1
    if remedy.key.endswith("max_token_len_per_gpu"):
        data = get_path(config, "data")
        lowest = data.max_length if "max_length" in data else data.max_prompt_length + data.max_response_length
    elif remedy.key.endswith("_length"):
        lowest = 64
    elif remedy.action == "double":
        trainer = get_path(config, "trainer")
        highest = trainer.n_gpus_per_node * (1 if remedy.key.endswith("tensor_model_parallel_size") else trainer.nnodes)
    return remedy.values(now, lowest, highest)


def _advice(changes: list[MemoryChange], fits: bool, fits_alone: bool) -> str:
    """Return the remedies as text. `fits`: with the changes; `fits_alone`: if other processes used no host memory."""
    stop_others = "stop other processes on this machine that hold memory (`ps aux --sort=-rss` lists them)"
    if fits_alone and not fits:
        return stop_others
    listed = "; ".join(f"{number}) {change}" for number, change in enumerate(changes, start=1))
    if fits:
        auto = "" if any(change.remedy.changes_training for change in changes) else "trainer.auto_memory=True, or "
        text = f"set {auto}all of these keys (each size includes the keys before it): {listed}"
        return f"{stop_others}; or {text}" if fits_alone else text
    hardware = "use more devices, tensor parallelism over them, a host with more memory, or a smaller model"
    return f"{listed}; that is not enough: {hardware}" if listed else hardware


@dataclass(frozen=True)
class LargestValue:
    """The largest value of a key with which the plan fits."""

    key: str
    now: int
    """The configured value."""
    value: int | None
    """None: the plan fits with no value."""
    limit: int
    """The largest value that was tried."""
    reason: str
    """What determines `limit`."""


@dataclass(frozen=True)
class LargestModel:
    """The largest known models that fit, by name; None: none does."""

    as_configured: str | None
    with_changes: str | None
    """With `changes` of the configuration that do not affect the results of training."""
    changes: tuple[MemoryChange, ...]
    tried: tuple[str, ...]


def largest_batch(config: Any, load: Load, plan_of: Planner) -> LargestValue:
    """Return the largest micro-batch of an update: its token budget with dynamic batch sizes, else its samples."""
    if isinstance(config, PPOConfig):
        block, dp = "actor_rollout_ref.actor", layout_of(config, "actor").dp_size
        actor = config.actor_rollout_ref.actor
        rows = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // dp
        longest = config.data.max_prompt_length + config.data.max_response_length
        dynamic = actor.use_dynamic_bsz
        name = "ppo_max_token_len_per_gpu" if dynamic else "ppo_micro_batch_size_per_gpu"
    else:
        block, rows, longest = "data", config.rows_per_step // config.dp_size, config.data.max_length
        dynamic = config.data.use_dynamic_bsz
        name = "max_token_len_per_gpu" if dynamic else "micro_batch_size_per_gpu"
    key = f"{block}.{name}"
    if dynamic:
        first = math.ceil(longest / _TOKEN_STEP) * _TOKEN_STEP
        values = [*range(first, rows * longest, _TOKEN_STEP), rows * longest]
    else:
        values = [size for size in range(1, rows + 1) if rows % size == 0]
    return _largest(key, get_path(config, key), values, load, plan_of, "the samples of a mini-batch on one rank")


def largest_length(config: Any, positions: int | None, load: Load, plan_of: Planner) -> LargestValue:
    """Return the largest response length (of a supervised run: row length). `positions`: context length of the model;
    None: unknown."""
    context = positions or 2**17
    if isinstance(config, PPOConfig):
        key, limit = "data.max_response_length", context - config.data.max_prompt_length
    else:
        key, limit = "data.max_length", context
    now = get_path(config, key)
    values = sorted({*range(_LENGTH_STEP, limit + 1, _LENGTH_STEP), limit, min(now, limit)})
    reason = f"the context of {context} tokens" if positions else "the longest length that is tried"
    return _largest(key, now, values, load, plan_of, reason)


def _largest(key: str, now: int, values: Sequence[int], load: Load, plan_of: Planner, reason: str) -> LargestValue:
    """Search `values` (ascending) by bisection: memory grows with the value. `reason`: see `LargestValue`."""

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
    """Return the largest known model that fits, as configured and with changes that do not affect the results of
    training.

    `replaced`: the roles that would use it, with the kind of their model and LoRA rank. `shapes`: the models of all
    roles.
    """
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
    """Return the last name that fits; None if none does. No bisection: a layout may divide a large model but not a
    small one."""
    for name in reversed(names):
        try:
            if fits(name):
                return name
        except ConfigError:  # a layout that does not divide this model
            continue
    return None
