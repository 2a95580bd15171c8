"""Reward managers by name (`reward_model.reward_manager`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Manager = TypeVar("Manager", bound=type[Any])

REWARD_MANAGER_REGISTRY: dict[str, type[Any]] = {}


def register(name: str) -> Callable[[Manager], Manager]:
    """Decorate a class `(tokenizer, num_examine, compute_score, reward_fn_key, …)` to make it known by `name`."""

    def add(cls: Manager) -> Manager:
        known = REWARD_MANAGER_REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"reward_manager {name!r}: {known.__qualname__} has this name. Choose another.")
        REWARD_MANAGER_REGISTRY[name] = cls
        return cls

    return add


def get_reward_manager_cls(name: str) -> type[Any]:
    """The class registered as `name`; a ValueError lists the known ones."""
    if name not in REWARD_MANAGER_REGISTRY:
        known = ", ".join(sorted(REWARD_MANAGER_REGISTRY))
        raise ValueError(
            f"reward_model.reward_manager: {name!r} is not registered (known: {known}). "
            "Choose one of these, or name the module that registers it in external_libs."
        )
    return REWARD_MANAGER_REGISTRY[name]
