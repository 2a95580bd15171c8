"""Calling an estimator by name with whatever the batch holds."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

from verl.algos.registry import get_adv_estimator_fn
from verl.algos.types import Advantages
from verl.config.names import ADV_ESTIMATORS


class _Name(str, Enum):
    def __str__(self) -> str:
        return self.value


# The estimators that come with verl, as `AdvantageEstimator.GRPO`; a user's own are plain names.
AdvantageEstimator = _Name("AdvantageEstimator", {name.upper(): name for name in ADV_ESTIMATORS})  # type: ignore[call-overload]


def takes_argument(adv_estimator: str | Enum, name: str) -> bool:
    """Whether the estimator names `name` among its parameters: what costs extra is computed only for those that do."""
    return name in inspect.signature(get_adv_estimator_fn(adv_estimator)).parameters


def estimate_advantages(adv_estimator: str | Enum, **available: Any) -> Advantages:
    """Run the estimator on those of `available` (token_level_rewards, response_mask, index, values, …) that it names.

    An estimator with `**kwargs` gets everything but what is None. What it needs and is not there is one error.
    """
    function = get_adv_estimator_fn(adv_estimator)
    available = {name: value for name, value in available.items() if value is not None}
    parameters = inspect.signature(function).parameters
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in available
    ]
    if missing:
        raise ValueError(
            f"algorithm.adv_estimator: {adv_estimator} needs {', '.join(missing)}, which this batch does not have "
            f"(found: {', '.join(available)})."
        )
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        available = {name: value for name, value in available.items() if name in parameters}
    return function(**available)
