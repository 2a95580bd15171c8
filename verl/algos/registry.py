"""Estimators and losses by name: ours and those a user's file adds by decorator."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

from verl.algos.types import Advantages, PolicyLoss

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Mapping[str, F]):
    """Functions by name; a mapping. `key` is the configuration key that chooses among them, for error messages."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._functions: dict[str, F] = {}

    def register(self, name: str | Enum) -> Callable[[F], F]:
        """`@register("mine")`: the function is found under that name from now on."""
        name = _text(name)

        def add(function: F) -> F:
            taken = self._functions.get(name)
            # The same file imported twice (external_libs, a notebook cell) defines its functions again.
            if taken is not None and _origin(taken) != _origin(function):
                raise ValueError(f"{self.key}: {name!r} is taken by {'.'.join(_origin(taken))}. Choose another name.")
            self._functions[name] = function
            return function

        return add

    def lookup(self, name: str | Enum) -> F:
        """The function of that name; a ValueError says which there are."""
        name = _text(name)
        if name not in self._functions:
            near = difflib.get_close_matches(name, self._functions, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{self.key}: {name!r} is not known.{hint} Known: {', '.join(self._functions)}. "
                "Names of your own: register them in a module listed in external_libs."
            )
        return self._functions[name]

    def __getitem__(self, name: str | Enum) -> F:
        return self._functions[_text(name)]

    def __setitem__(self, name: str | Enum, function: F) -> None:
        self.register(name)(function)

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)


ADV_ESTIMATORS: Registry[Callable[..., Advantages]] = Registry("algorithm.adv_estimator")
POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")

register_adv_est = ADV_ESTIMATORS.register
get_adv_estimator_fn = ADV_ESTIMATORS.lookup
register_policy_loss = POLICY_LOSSES.register
get_policy_loss_fn = POLICY_LOSSES.lookup


def _text(name: str | Enum) -> str:
    return str(name.value if isinstance(name, Enum) else name)


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__
