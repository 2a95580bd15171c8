"""Alias module: the public names of the algorithms, which are implemented in `verl.algos`."""

from verl.algos.advantage.gae import compute_gae_advantage_return
from verl.algos.advantage.gdpo import compute_gdpo_outcome_advantage
from verl.algos.advantage.gpg import compute_gpg_outcome_advantage
from verl.algos.advantage.grpo import compute_grpo_outcome_advantage
from verl.algos.advantage.grpo_passk import compute_grpo_passk_outcome_advantage
from verl.algos.advantage.opo import compute_opo_outcome_advantage
from verl.algos.advantage.reinforce_plus_plus import compute_reinforce_plus_plus_outcome_advantage
from verl.algos.advantage.reinforce_plus_plus_baseline import compute_reinforce_plus_plus_baseline_outcome_advantage
from verl.algos.advantage.remax import compute_remax_outcome_advantage
from verl.algos.advantage.rloo import compute_rloo_outcome_advantage
from verl.algos.kl import AdaptiveKLController, FixedKLController, compute_kl_loss, get_kl_controller, kl_penalty
from verl.algos.losses import compute_entropy_loss, compute_value_loss
from verl.algos.masked_ops import agg_loss, global_share
from verl.algos.policy_loss.cispo import compute_policy_loss_cispo
from verl.algos.policy_loss.clip_cov import compute_policy_loss_clip_cov
from verl.algos.policy_loss.geo_mean import compute_policy_loss_geo_mean
from verl.algos.policy_loss.gpg import compute_policy_loss_gpg
from verl.algos.policy_loss.gspo import compute_policy_loss_gspo
from verl.algos.policy_loss.kl_cov import compute_policy_loss_kl_cov
from verl.algos.policy_loss.sapo import compute_policy_loss_sapo
from verl.algos.policy_loss.vanilla import compute_policy_loss, compute_policy_loss_vanilla
from verl.algos.registry import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageEstimator,
    estimate_advantages,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from verl.algos.rollout_correction import correct_rollout, mismatch_metrics

ADV_ESTIMATOR_REGISTRY = ADV_ESTIMATORS
POLICY_LOSS_REGISTRY = POLICY_LOSSES
compute_reinforce_plus_plus_advantage = compute_reinforce_plus_plus_outcome_advantage
# All estimators are vectorised.
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_kl_loss",
    "compute_opo_outcome_advantage",
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
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
]
