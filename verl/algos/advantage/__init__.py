"""From rewards to advantages: one file per estimator, each registered under its name."""

from verl.algos.advantage.estimate import AdvantageEstimator, estimate_advantages, takes_argument
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

__all__ = [
    "AdvantageEstimator",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "estimate_advantages",
    "takes_argument",
]
