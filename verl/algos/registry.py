"""Estimators and policy losses by name; a file adds one by decorator (`verl.config.extensions`)."""

from __future__ import annotations

from collections.abc import Callable

from verl.algos.types import Advantages, PolicyLoss
from verl.config import names
from verl.utils.registry import Registry

ADV_ESTIMATORS: Registry[Callable[..., Advantages]] = Registry("algorithm.adv_estimator", names.ADV_ESTIMATORS)
POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode", names.POLICY_LOSSES
)

register_adv_est = ADV_ESTIMATORS.register
get_adv_estimator_fn = ADV_ESTIMATORS.lookup
register_policy_loss = POLICY_LOSSES.register
get_policy_loss_fn = POLICY_LOSSES.lookup
