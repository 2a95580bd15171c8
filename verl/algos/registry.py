"""Advantage estimators and policy losses by name: their types, how they are registered and how they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeAlias

import torch
from omegaconf import DictConfig

from verl.config import ActorConfig, AlgorithmConfig, names
from verl.utils.registry import Registry

# A function that takes a configuration accepts the typed one, a DictConfig, a dict, or None (the defaults).
AlgorithmLike: TypeAlias = AlgorithmConfig | DictConfig | Mapping[str, Any] | None
ActorLike: TypeAlias = ActorConfig | DictConfig | Mapping[str, Any] | None

# (advantages, returns), both [batch, response], 0 where the mask is 0.
Advantages: TypeAlias = tuple[torch.Tensor, torch.Tensor]
# A scalar with a gradient, and detached scalar metrics, each a mean over the model tokens of this (micro-)batch.
PolicyLoss: TypeAlias = tuple[torch.Tensor, dict[str, torch.Tensor]]

ADV_ESTIMATORS: Registry[Callable[..., Advantages]] = Registry("algorithm.adv_estimator", names.ADV_ESTIMATORS)
POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode", names.POLICY_LOSSES
)

register_adv_est = ADV_ESTIMATORS.register
get_adv_estimator_fn = ADV_ESTIMATORS.lookup
register_policy_loss = POLICY_LOSSES.register
get_policy_loss_fn = POLICY_LOSSES.lookup


class _Name(str, Enum):
    def __str__(self) -> str:
        return self.value


# The built-in estimators, e.g. `AdvantageEstimator.GRPO`; registered ones are only known by their names.
AdvantageEstimator = _Name("AdvantageEstimator", {name.upper(): name for name in names.ADV_ESTIMATORS})  # type: ignore[call-overload]


def takes_argument(adv_estimator: str | Enum, name: str) -> bool:
    """Whether the estimator has a parameter `name`; expensive inputs are computed only for estimators that do."""
    return name in inspect.signature(get_adv_estimator_fn(adv_estimator)).parameters


def estimate_advantages(adv_estimator: str | Enum, **available: Any) -> Advantages:
    """Call the estimator with those of `available` (token_level_rewards, response_mask, index, …) that it has
    parameters for; with all of them if it has `**kwargs`. Arguments that are None count as missing.

    Raises ValueError, which lists all missing required arguments.
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
