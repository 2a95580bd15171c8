"""Estimators and losses by name: ours and those a user's file adds by decorator."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Generic, TypeVar

from verl.algos.types import Advantages, PolicyLoss

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions by name. `key` is the configuration key that chooses among them, for error messages."""

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

    def get(self, name: str | Enum) -> F:
        name = _text(name)
        if name not in self._functions:
            near = difflib.get_close_matches(name, self._functions, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{self.key}: {name!r} is not known.{hint} Known: {', '.join(self._functions)}. "
                "Names of your own: register them in a module listed in external_libs."
            )
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)


ADV_ESTIMATORS: Registry[Callable[..., Advantages]] = Registry("algorithm.adv_estimator")
POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")

register_adv_est = ADV_ESTIMATORS.register
get_adv_estimator_fn = ADV_ESTIMATORS.get
register_policy_loss = POLICY_LOSSES.register
get_policy_loss_fn = POLICY_LOSSES.get


def _text(name: str | Enum) -> str:
    return str(name.value if isinstance(name, Enum) else name)


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__
