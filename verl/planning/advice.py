"""A plan that cannot fit is refused, or repaired, with the cheapest changes that make it fit and what each gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.config.load import root_of
from verl.config.problems import ConfigError, Problem, Report
from verl.config.schema import Block, pick, put
from verl.planning.phases import GB, MemoryPlan
from verl.planning.remedies import UNKNOWN, Remedy, helpful, value_of

# How far a plan may be above what is measured: what exceeds the room by less is warned of, not refused.
UNCERTAINTY = 0.07
# A change that gives less is not worth naming.
_WORTH = 0.005

Planner = Callable[[Any], MemoryPlan]


@dataclass(frozen=True)
class Change:
    """One key set to another value for a phase's sake, and what that phase takes before and after."""

    remedy: Remedy
    before: Any
    value: Any
    phase: str
    was: float
    total: float

    @property
    def key(self) -> str:
        return self.remedy.key

    def __str__(self) -> str:
        return f"{self.key}={self.value} (now {self.before}): {self.phase} {self.total / GB:.1f} GB"

    def told(self) -> str:
        """For the log, once it is made."""
        saved = f"{self.phase} {self.was / GB:.1f} -> {self.total / GB:.1f} GB"
        return f"{self.key}: {self.before} -> {self.value} ({saved}; costs: {self.remedy.cost})"


def refuse_what_cannot_fit(config: Block, plan_of: Planner) -> list[str]:
    """Raise ConfigError for a plan beyond its room even if it is `UNCERTAINTY` too high; else what to warn of.

    `plan_of` makes the plan of a configuration like this one.
    """
    plan = plan_of(config)
    worst = plan.fullest
    if not worst.excess or worst.room is None:
        return []
    changes, fits = cheapest_changes(config, plan_of)
    needs = f"the {worst.phase} phase is planned to take {worst.total / GB:.1f} GB of {worst.where}'s"
    needs += f" {worst.room / GB:.1f} GB"
    if plan.installed is not None and plan.limited_by_host(worst):
        needs += f" of available host memory (the host has {plan.installed / GB:.1f} GB, of which other processes hold"
        needs += f" {plan.used / GB:.1f} GB)"
    advice = _advice(changes, fits, freeing=plan.fits_if_alone(worst))
    if worst.total * (1 - UNCERTAINTY) <= worst.room:
        return [f"Memory: {needs}. It may just fit. If it does not: {advice}."]
    key, value = next(
        ((change.key, change.before) for change in changes),
        ("trainer.n_gpus_per_node", pick(config, "trainer.n_gpus_per_node")),
    )
    raise ConfigError([Problem(key, value, needs, advice[0].upper() + advice[1:])])


def repair(config: Block, plan_of: Planner) -> list[Change]:
    """Make the cheapest changes that let everything fit, in place; none, and nothing changed, where that cannot be
    without changing the training."""
    changes, fits = cheapest_changes(config, plan_of, lambda remedy: not remedy.changes_training)
    for change in changes if fits else ():
        put(config, change.key, change.value)
    return changes if fits else []


def cheapest_changes(
    config: Block, plan_of: Planner, allowed: Callable[[Remedy], bool] = lambda remedy: True
) -> tuple[list[Change], bool]:
    """Changes made one after the other in the order of cost, no more and no further than needed; and whether all fits.

    Each remedy in turn is used as far as it helps the fullest phase without pushing another beyond its room; once
    everything fits, what turned out not to be needed is taken back, the costliest first.
    """
    trial = copy.deepcopy(config)
    made: list[Change] = []
    plan = plan_of(trial)
    while plan.excess:
        tried = {change.key for change in made}
        change = next((found for found in _moves(trial, plan, plan_of, allowed) if found.key not in tried), None)
        if change is None:
            return made, False
        put(trial, change.key, change.value)
        made.append(change)
        plan = plan_of(trial)
    return _no_more_than_needed(config, made, plan_of), True


def _no_more_than_needed(config: Block, made: list[Change], plan_of: Planner) -> list[Change]:
    values = {change.key: change.value for change in made}
    for change in reversed(made):
        for value in (change.before, *_possible(config, change.remedy, change.before)):
            changed = _with(config, values | {change.key: value})
            if not plan_of(changed).excess and _valid(changed):
                values[change.key] = value
                break
    found: list[Change] = []
    so_far = config
    for change in made:
        if values[change.key] != change.before:
            before, so_far = so_far, _with(so_far, {change.key: values[change.key]})
            was, total = (plan_of(each).phase(change.phase).total for each in (before, so_far))
            found.append(Change(change.remedy, change.before, values[change.key], change.phase, was, total))
    return found


def _moves(config: Block, plan: MemoryPlan, plan_of: Planner, allowed: Callable[[Remedy], bool]) -> Iterator[Change]:
    """For the fullest phase: of each remedy in turn the mildest value that makes that phase fit, or its furthest."""
    phase = plan.fullest
    for remedy, now in helpful(phase.phase, partial(value_of, config)):
        if now is UNKNOWN or not allowed(remedy):
            continue
        best: Change | None = None
        for value in _possible(config, remedy, now):
            changed = _with(config, {remedy.key: value})
            after = plan_of(changed)
            found = after.phase(phase.phase)
            least = best.total if best is not None else phase.total
            if found.total < least * (1 - _WORTH) and after.excess < plan.excess and _valid(changed):
                best = Change(remedy, now, value, phase.phase, phase.total, found.total)
            if not found.excess:
                break
        if best is not None:
            yield best


def _valid(config: Block) -> bool:
    report = Report()
    root_of(type(config)).validate(config, report)
    return not report.problems


def _with(config: Block, values: Mapping[str, Any]) -> Block:
    changed = copy.deepcopy(config)
    for key, value in values.items():
        put(changed, key, value)
    return changed


def _possible(config: Block, remedy: Remedy, now: Any) -> Iterator[Any]:
    """Values that the rest of the configuration allows."""
    least, most = 1, 1
    if remedy.key.endswith("max_token_len_per_gpu"):
        data = pick(config, "data")
        least = data.max_length if "max_length" in data else data.max_prompt_length + data.max_response_length
    elif remedy.key.endswith("_length"):
        least = 64
    elif remedy.way == "double":
        trainer = pick(config, "trainer")
        most = trainer.n_gpus_per_node * (1 if remedy.key.endswith("tensor_model_parallel_size") else trainer.nnodes)
    return remedy.values(now, least, most)


def _advice(changes: list[Change], fits: bool, freeing: bool) -> str:
    """`freeing`: it would fit if other processes held no host memory."""
    free = "stop other processes on this machine that hold memory (`ps aux --sort=-rss` lists them)"
    if freeing and not fits:
        return free
    listed = "; ".join(f"{number}) {change}" for number, change in enumerate(changes, start=1))
    if fits:
        auto = "" if any(change.remedy.changes_training for change in changes) else " trainer.auto_memory=True, or"
        text = f"set{auto}, cheapest first and each on top of those before: {listed}"
        return f"{free}; or {text}" if freeing else text
    rest = "use more devices, tensor parallelism over them, a host with more memory, or a smaller model"
    return f"{listed}; that is not enough: {rest}" if listed else rest
