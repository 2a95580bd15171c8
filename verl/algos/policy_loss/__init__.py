"""From advantages to a loss: one file per policy loss, each registered under its name."""

from verl.algos.policy_loss.cispo import compute_policy_loss_cispo
from verl.algos.policy_loss.clip_cov import compute_policy_loss_clip_cov
from verl.algos.policy_loss.geo_mean import compute_policy_loss_geo_mean
from verl.algos.policy_loss.gpg import compute_policy_loss_gpg
from verl.algos.policy_loss.gspo import compute_policy_loss_gspo
from verl.algos.policy_loss.kl_cov import compute_policy_loss_kl_cov
from verl.algos.policy_loss.sapo import compute_policy_loss_sapo
from verl.algos.policy_loss.vanilla import compute_policy_loss, compute_policy_loss_vanilla

__all__ = [
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
]
