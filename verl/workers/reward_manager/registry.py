"""Reward managers by name (`reward_model.reward_manager`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Manager = TypeVar("Manager", bound=type[Any])

_MANAGERS: dict[str, type[Any]] = {}


def register(name: str) -> Callable[[Manager], Manager]:
    """Decorate a class `(tokenizer, num_examine, compute_score, reward_fn_key, …)` to make it known by `name`."""

    def add(cls: Manager) -> Manager:
        known = _MANAGERS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"reward_manager {name!r}: {known.__qualname__} has this name. Choose another.")
        _MANAGERS[name] = cls
        return cls

    return add


def get_reward_manager_cls(name: str) -> type[Any]:
    """The class registered as `name`; a ValueError lists the known ones."""
    if name not in _MANAGERS:
        raise ValueError(
            f"reward_model.reward_manager: {name!r} is not registered (known: {', '.join(sorted(_MANAGERS))}). "
            "Choose one of these, or name the module that registers it in external_libs."
        )
    return _MANAGERS[name]
