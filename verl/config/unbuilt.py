"""What the configuration knows and this version does not do yet: refused, or said where it only has no effect.

A key goes from here when something reads it; `tests/house/test_keys.py` holds that every key is read or is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from verl.config import names
from verl.config.changes import name_idle
from verl.config.plan import ACTOR, BLOCK_OF_ROLE, ROLLOUT, active_roles
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.schema import pick

NOT_BUILT = "is not built yet in this version"
_ENGINES = {name: row for name, row in names.TRAINING_ENGINES.items() if not row.at}
_ROLLOUTS = tuple(name for name in names.ROLLOUTS if name not in names.BUILT_ROLLOUTS)
# Values that stand for something to come: key -> (values, what to set instead).
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    f"{ROLLOUT}.name": (
        _ROLLOUTS,
        f"Set {ROLLOUT}.name=native, which needs no install",
    ),
    f"{ROLLOUT}.multi_turn.enable": ((True,), "Leave it out: every answer is one turn"),
    "do_search": ((True,), "Leave it out: the model answers without searching"),
    f"{ACTOR}.strategy": (tuple(_ENGINES), f"Set {ACTOR}.strategy=fsdp2"),
    "critic.strategy": (tuple(_ENGINES), "Set critic.strategy=fsdp2"),
    "actor_rollout_ref.ref.strategy": (tuple(_ENGINES), "Leave it out: it follows the actor's"),
    "reward_model.strategy": (tuple(_ENGINES), "Leave it out: it follows the actor's"),
}
# Keys that only what is not built would read: pattern -> what that is. Away from its default such a key does nothing.
NO_EFFECT: Mapping[str, str] = {
    f"{ROLLOUT}.mode": "asynchronous rollout is not built yet; generation runs as with sync",
    f"{ROLLOUT}.multi_turn.*": "turns and tools are not built yet",
    f"{ROLLOUT}.agent.*": "agents are not built yet",
    "max_turns": "the search agent is not built yet",
    "retriever.*": "the search agent is not built yet",
    "algorithm.state_masking.*": "the search agent is not built yet",
    **{f"*.{row.block}.*": f"the {name} engine is not built yet" for name, row in _ENGINES.items()},
}
_LOAD_FORMATS = ("auto", "dummy")


def check_built(config: PPOConfig, report: Report) -> None:
    """Report every key that asks for something that is not built, and name those that have no effect for now."""
    _refuse(config, report)
    name_idle(config, lambda path: None if path in REFUSED else why_no_effect(path), report)
    _engine_keys(config, report)


def why_no_effect(path: str) -> str | None:
    """Why nothing reads the key at `path` yet; None for a key that works."""
    return next((reason for pattern, reason in NO_EFFECT.items() if fnmatchcase(path, pattern)), None)


def _refuse(config: PPOConfig, report: Report) -> None:
    roles = {path: role for role, path in BLOCK_OF_ROLE.items()}
    active, actor = active_roles(config), config.actor_rollout_ref.actor.strategy
    for path, (values, instead) in REFUSED.items():
        value, role = pick(config, path), roles.get(path.rpartition(".")[0])
        follows_actor = role in ("ref", "reward_model") and value == actor
        if value in values and (role is None or role in active) and not follows_actor:
            report.broken(path, value, NOT_BUILT, instead)
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if size > 1 and config.actor_rollout_ref.rollout.name == "hf":
        why, fix = f"{NOT_BUILT} for {ROLLOUT}.name = hf", f"Set it to 1, or {ROLLOUT}.name=native"
        report.broken(f"{ROLLOUT}.tensor_model_parallel_size", size, why, fix)


def _engine_keys(config: PPOConfig, report: Report) -> None:
    """Arguments for other engines, and formats of theirs."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name not in names.BUILT_ROLLOUTS:
        return
    others = [name for name in rollout.engine_kwargs if name != "native" or rollout.name != "native"]
    for name in others:
        report.notice(f"{ROLLOUT}.engine_kwargs.{name} has no effect with {ROLLOUT}.name = {rollout.name}.")
    if rollout.load_format not in _LOAD_FORMATS:
        report.notice(
            f"{ROLLOUT}.load_format = {rollout.load_format} is read as auto: {rollout.name} knows auto and dummy."
        )
