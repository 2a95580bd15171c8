"""Reinforcement learning algorithms as pure tensor functions: advantages, losses, KL, rollout correction."""

from verl.algos.kl import AdaptiveKLController, FixedKLController, compute_kl_loss, get_kl_controller, kl_penalty
from verl.algos.losses import compute_entropy_loss, compute_value_loss
from verl.algos.masked_ops import agg_loss, global_share, rows_of_trajectories
from verl.algos.policy_loss.vanilla import compute_policy_loss
from verl.algos.registry import (
    AdvantageEstimator,
    estimate_advantages,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
    takes_argument,
)
from verl.algos.rollout_correction import Correction, correct_rollout, mismatch_metrics

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "Correction",
    "FixedKLController",
    "agg_loss",
    "compute_entropy_loss",
    "compute_kl_loss",
    "compute_policy_loss",
    "compute_value_loss",
    "correct_rollout",
    "estimate_advantages",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "global_share",
    "kl_penalty",
    "mismatch_metrics",
    "register_adv_est",
    "register_policy_loss",
    "rows_of_trajectories",
    "takes_argument",
]
