"""Which keys a user has set away from their defaults, and those of them that do nothing: told by reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.config.compose import alternatives
from verl.config.problems import Report, show
from verl.config.schema import Block, join, pick, walk

# So many keys are named in one notice; scripts set whole blocks.
_NAMED = 5


def changed_keys(config: Block, defaults: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Every key that is not at its default, with its value; of a configuration whose nulls are not resolved yet.

    The default of any option of the key's group counts: once Hydra has composed `algorithm=grpo`, nobody knows.
    """
    found = {}
    for path, entry in walk(type(config)):
        value = pick(config, path) if entry.block is None else None
        if entry.block is None and value != pick(defaults, path) and not _is_an_option(path, value, root):
            found[path] = value
    return found


def _is_an_option(path: str, value: Any, root: str) -> bool:
    group, _, below = path.partition(".")
    return any(_at(option, below) == value for option in alternatives(group, root))


def _at(values: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def name_idle(config: Any, why: Callable[[str], str | None], report: Report) -> None:
    """One notice per reason that `why` gives, with the keys that were set for nothing."""
    idle: dict[str, list[str]] = {}
    followed = _followed(type(config))
    for path, value in config.changed.items():
        if path in followed and pick(config, followed[path]) == value:
            continue  # as when it is left out
        reason = why(path)
        if reason is not None:
            idle.setdefault(reason, []).append(f"{path} = {show(value)}")
    for reason, keys in idle.items():
        more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        report.notice(f"{', '.join(keys[:_NAMED])}{more}: no effect, {reason}.")


def _followed(cls: type[Block]) -> dict[str, str]:
    """Each key that takes over another's value when it is null, and that other."""
    found: dict[str, str] = {}
    for path, entry in walk(cls):
        target = entry.key.follows
        if target is not None and entry.block is not None:
            found |= {join(path, name): join(target, name) for name, _ in walk(entry.block)}
        elif target is not None:
            found[path] = target
    return found
