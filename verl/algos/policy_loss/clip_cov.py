"""`clip_cov`: PPO clip that drops the gradient of some tokens (arXiv 2505.22617).

The tokens are chosen at random from those with a high covariance of log-prob and advantage, which reduce the entropy
most.
"""

from __future__ import annotations

import torch

from verl.algos.losses import aggregate, clipped_surrogate, covariance, loss_config, mask_inputs, token_count
from verl.algos.registry import ActorLike, PolicyLoss, register_policy_loss


@register_policy_loss(
    "clip_cov", paper="2505.22617", loss_agg_mode="token-mean", clip=(0.2, 0.2), reads=("policy_loss.clip_cov_*",)
)
def compute_policy_loss_clip_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> PolicyLoss:
    """PPO's clipped loss, with loss 0 for randomly selected tokens.

    Candidates are tokens whose covariance term (log-prob and advantage, centered) is in [`clip_cov_lb`, `clip_cov_ub`].
    `policy_loss.clip_cov_ratio` is the fraction of all tokens to select. Terms and selection are computed per
    micro-batch, so this loss depends on the micro-batch size. Random numbers are drawn from `generator`; by default
    from one seeded by the old log-probs, so that the selection is the same on any rank and in a resumed run.
    """
    config = loss_config("clip_cov", config)
    options = config.policy_loss
    inputs = mask_inputs(old_log_prob, log_prob, advantages, response_mask)
    ratio = inputs.log_ratio.exp()
    losses, clipped = clipped_surrogate(ratio, inputs.advantages, config.clip_ratio_low, config.clip_ratio_high)
    token_covariance = covariance(inputs)
    candidates = inputs.mask & ~clipped
    candidates &= (token_covariance >= options.clip_cov_lb) & (token_covariance <= options.clip_cov_ub)
    positions = candidates.flatten().nonzero().squeeze(-1)
    if generator is None:
        generator = _generator_seeded_by(old_log_prob.detach()[inputs.mask])
    shuffled = positions[torch.randperm(len(positions), generator=generator, device=losses.device)]
    selected_positions = shuffled[: token_count(inputs.mask, options.clip_cov_ratio)]
    selected = torch.zeros_like(candidates).flatten().index_fill_(0, selected_positions, True).view_as(candidates)
    losses = losses.masked_fill(selected, 0.0)
    metrics = {"clipfrac": clipped | selected, "clip_cov_fraction": selected}
    return aggregate(losses, inputs, loss_agg_mode, config, rollout_is_weights, metrics)


def _generator_seeded_by(values: torch.Tensor) -> torch.Generator:
    """Return a generator whose seed is computed from the values."""
    bits = values.double().sum().view(torch.int64).item()
    return torch.Generator(device=values.device).manual_seed(int(bits) & (2**63 - 1))
