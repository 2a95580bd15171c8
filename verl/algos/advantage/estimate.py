"""Calling an estimator by name with whatever the batch holds."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

from verl.algos.registry import get_adv_estimator_fn
from verl.algos.types import Advantages


class AdvantageEstimator(str, Enum):
    """The estimators that come with verl; a user's own are plain names."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_PASSK = "grpo_passk"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    RLOO = "rloo"
    OPO = "opo"
    REMAX = "remax"
    GPG = "gpg"
    GDPO = "gdpo"

    def __str__(self) -> str:
        return self.value


def takes_argument(adv_estimator: str | AdvantageEstimator, name: str) -> bool:
    """Whether the estimator names `name` among its parameters: what costs extra is computed only for those that do."""
    return name in inspect.signature(get_adv_estimator_fn(adv_estimator)).parameters


def estimate_advantages(adv_estimator: str | AdvantageEstimator, **available: Any) -> Advantages:
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
