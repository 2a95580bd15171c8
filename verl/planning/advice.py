"""A plan that cannot fit is refused, with the cheapest changes that would make it fit and what each of them gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.problems import ConfigError, Problem
from verl.config.schema import Block, pick, put
from verl.planning.costs import GB
from verl.planning.plan import MemoryPlan, PhaseMemory
from verl.planning.remedies import UNKNOWN, Remedy, helpful, remedies

# How far a plan may be off: what exceeds the device by less is warned of, not refused.
UNCERTAINTY = 0.15
# A change that gives less is not worth naming.
_WORTH = 0.005

Planner = Callable[[Any], MemoryPlan]


@dataclass(frozen=True)
class Change:
    """One key set to another value, and what the fullest phase takes then."""

    key: str
    before: Any
    value: Any
    phase: str
    total: float

    def __str__(self) -> str:
        return f"{self.key}={self.value} (now {self.before}): {self.phase} {self.total / GB:.1f} GB"


def refuse_what_cannot_fit(config: Block, plan_of: Planner) -> list[str]:
    """Raise ConfigError for a plan beyond its device even if it is `UNCERTAINTY` too high; else what to warn of.

    `plan_of` makes the plan of a configuration like this one.
    """
    plan = plan_of(config)
    worst = plan.fullest
    if plan.device is None or worst.total <= plan.device.total:
        return []
    changes, fits = cheapest_changes(config, plan_of)
    room = f"{plan.device.total / GB:.1f} GB"
    needs = f"the {worst.phase} phase is planned to take {worst.total / GB:.1f} GB of a device's {room}"
    advice = _advice(changes, fits)
    if worst.total * (1 - UNCERTAINTY) <= plan.device.total:
        return [f"Memory: {needs}. It may just fit. If it does not: {advice}."]
    key, value = (changes[0].key, changes[0].before) if changes else _first_key(worst, config)
    raise ConfigError([Problem(key, value, needs, advice[0].upper() + advice[1:])])


def cheapest_changes(config: Block, plan_of: Planner) -> tuple[list[Change], bool]:
    """Changes made one after the other in the order of cost, no more and no further than needed; and whether all fits.

    Each remedy in turn is used as far as it helps the fullest phase; once everything fits, what turned out not to be
    needed is taken back, the costliest first.
    """
    trial = copy.deepcopy(config)
    made: list[Change] = []
    plan = plan_of(trial)
    tried: set[str] = set()
    while not _fits(plan):
        change = next(_moves(trial, plan, plan_of, tried), None)
        if change is None:
            return made, False
        put(trial, change.key, change.value)
        tried.add(change.key)
        made.append(change)
        plan = plan_of(trial)
    return _no_more_than_needed(config, made, plan_of), True


def _no_more_than_needed(config: Block, made: list[Change], plan_of: Planner) -> list[Change]:
    values = {change.key: change.value for change in made}
    for change in reversed(made):
        remedy = next(r for r in remedies(change.phase) if r.key == change.key)
        for value in (change.before, *_possible(config, remedy, change.before)):
            if _fits(plan_of(_with(config, values | {change.key: value}))):
                values[change.key] = value
                break
    kept = [change for change in made if values[change.key] != change.before]
    found = []
    for number, change in enumerate(kept, start=1):
        so_far = _with(config, {other.key: values[other.key] for other in kept[:number]})
        phase = _phase_of(plan_of(so_far), change.phase)
        found.append(Change(change.key, change.before, values[change.key], change.phase, phase.total))
    return found


def _with(config: Block, values: Mapping[str, Any]) -> Block:
    changed = copy.deepcopy(config)
    for key, value in values.items():
        put(changed, key, value)
    return changed


def _moves(config: Block, plan: MemoryPlan, plan_of: Planner, tried: set[str]) -> Iterator[Change]:
    """For the fullest phase: of each remedy in turn the mildest value that makes that phase fit, or its furthest."""
    phase = plan.fullest
    for remedy, now in helpful(phase.phase, lambda key: _value(config, key)):
        if remedy.key in tried or now is UNKNOWN:
            continue
        best: Change | None = None
        for value in _possible(config, remedy, now):
            found = _phase_of(plan_of(_with(config, {remedy.key: value})), phase.phase)
            if found.total < (best.total if best is not None else phase.total) * (1 - _WORTH):
                best = Change(remedy.key, now, value, phase.phase, found.total)
            if plan.device is not None and found.total <= plan.device.total:
                break
        if best is not None:
            yield best


def _possible(config: Block, remedy: Remedy, now: Any) -> Iterator[Any]:
    """Values that the rest of the configuration allows."""
    least, most = 1, 1
    if remedy.key.endswith("max_token_len_per_gpu"):
        least = _longest(config)
    elif remedy.key.endswith(("_prompt_length", "_response_length", "max_length")):
        least = 64
    elif remedy.way == "double":
        trainer = pick(config, "trainer")
        most = trainer.n_gpus_per_node * (1 if remedy.key.endswith("tensor_model_parallel_size") else trainer.nnodes)
    return remedy.values(now, least, most)


def _longest(config: Block) -> int:
    data = pick(config, "data")
    return data.max_length if "max_length" in data else data.max_prompt_length + data.max_response_length


def _fits(plan: MemoryPlan) -> bool:
    return plan.device is None or plan.fullest.total <= plan.device.total


def _phase_of(plan: MemoryPlan, name: str) -> PhaseMemory:
    return next(phase for phase in plan.phases if phase.phase == name)


def _advice(changes: list[Change], fits: bool) -> str:
    said = "; ".join(f"{number}) {change}" for number, change in enumerate(changes, start=1))
    if fits:
        return f"set, cheapest first and each on top of those before: {said}"
    rest = "use more devices, tensor parallelism over them, or a smaller model"
    return f"{said}; that is not enough: {rest}" if said else rest


def _first_key(phase: PhaseMemory, config: Block) -> tuple[str, Any]:
    remedy, now = next(iter(helpful(phase.phase, lambda key: _value(config, key))), (None, None))
    return (
        (remedy.key, now)
        if remedy is not None
        else ("trainer.n_gpus_per_node", pick(config, "trainer.n_gpus_per_node"))
    )


def _value(config: Block, key: str) -> Any:
    try:
        return pick(config, key)
    except (KeyError, AttributeError):
        return UNKNOWN
