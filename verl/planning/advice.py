"""Find the cheapest config changes that make a memory plan fit; report them as an error, or apply them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.config.load import root_of
from verl.config.problems import ConfigError, Problem, Report
from verl.config.schema import Block, get_path, set_path
from verl.planning.phases import GB, MemoryPlan
from verl.planning.remedies import UNKNOWN, Remedy, applicable_remedies, value_of

# The plan may overestimate by this fraction: a smaller excess is a warning, not an error.
UNCERTAINTY = 0.07
# Changes that reduce the peak by a smaller fraction are ignored.
_MIN_REDUCTION = 0.005

Planner = Callable[[Any], MemoryPlan]


@dataclass(frozen=True)
class MemoryChange:
    """A key set to another value, and the total memory of the phase that it reduces, before and after."""

    remedy: Remedy
    before: Any
    value: Any
    phase: str
    total_before: float
    total: float

    @property
    def key(self) -> str:
        return self.remedy.key

    def __str__(self) -> str:
        return f"{self.key}={self.value} (now {self.before}): {self.phase} {self.total / GB:.1f} GB"

    def log_text(self) -> str:
        """Return the log message of an applied change."""
        memory = f"{self.phase} {self.total_before / GB:.1f} -> {self.total / GB:.1f} GB"
        return f"{self.key}: {self.before} -> {self.value} ({memory}; costs: {self.remedy.cost})"


def check_fits(config: Block, plan_of: Planner) -> list[str]:
    """Raise ConfigError if the plan exceeds the capacity by more than `UNCERTAINTY`; otherwise return warnings.

    `plan_of` computes the plan of a configuration.
    """
    plan = plan_of(config)
    worst = plan.worst_phase
    if not worst.excess or worst.capacity is None:
        return []
    changes, fits = cheapest_changes(config, plan_of)
    needs = f"the {worst.phase} phase is planned to take {worst.total / GB:.1f} GB of {worst.location}'s"
    needs += f" {worst.capacity / GB:.1f} GB"
    if plan.installed is not None and plan.limited_by_host(worst):
        needs += f" of available host memory (the host has {plan.installed / GB:.1f} GB, of which other processes hold"
        needs += f" {plan.used / GB:.1f} GB)"
    advice = _advice(changes, fits, freeing=plan.fits_without_other_processes(worst))
    if worst.total * (1 - UNCERTAINTY) <= worst.capacity:
        return [f"Memory: {needs}. It may just fit. If it does not: {advice}."]
    key, value = next(
        ((change.key, change.before) for change in changes),
        ("trainer.n_gpus_per_node", get_path(config, "trainer.n_gpus_per_node")),
    )
    raise ConfigError([Problem(key, value, needs, advice[0].upper() + advice[1:])])


def apply_cheapest_changes(config: Block, plan_of: Planner) -> list[MemoryChange]:
    """Apply the cheapest changes that make the plan fit to `config`, and return them.

    If it cannot fit without changing the results of training, nothing is changed, and the list is empty.
    """
    changes, fits = cheapest_changes(config, plan_of, lambda remedy: not remedy.changes_training)
    for change in changes if fits else ():
        set_path(config, change.key, change.value)
    return changes if fits else []


def cheapest_changes(
    config: Block, plan_of: Planner, allowed: Callable[[Remedy], bool] = lambda remedy: True
) -> tuple[list[MemoryChange], bool]:
    """Return a minimal list of changes in the order of cost, and whether the plan fits with them.

    Each remedy in turn is applied as far as it reduces the worst phase without another phase exceeding its capacity.
    When everything fits, changes that turned out to be unnecessary are reverted, the most expensive first.
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
    """Return the changes with the mildest values that still fit, without those that are not needed."""
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
    """Yield, for each remedy of the worst phase, the mildest value with which it fits, or else the best one."""
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
            lowest = (best.total if best is not None else phase.total) * (1 - _MIN_REDUCTION)
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
    """Yield the values to try after `now` that other keys allow."""
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


def _advice(changes: list[MemoryChange], fits: bool, freeing: bool) -> str:
    """Return the text of the advice. `freeing`: it would fit if other processes used no host memory."""
    free = "stop other processes on this machine that hold memory (`ps aux --sort=-rss` lists them)"
    if freeing and not fits:
        return free
    listed = "; ".join(f"{number}) {change}" for number, change in enumerate(changes, start=1))
    if fits:
        auto = "" if any(change.remedy.changes_training for change in changes) else " trainer.auto_memory=True, or"
        text = f"set{auto}, cheapest first and each on top of those before: {listed}"
        return f"{free}; or {text}" if freeing else text
    hardware = "use more devices, tensor parallelism over them, a host with more memory, or a smaller model"
    return f"{listed}; that is not enough: {hardware}" if listed else hardware
