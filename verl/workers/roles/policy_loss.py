"""The actor's loss on one micro-batch: policy loss, entropy bonus, KL to the reference; normalised by global counts."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos import agg_loss, compute_kl_loss, get_policy_loss_fn, global_share
from verl.config import ActorConfig
from verl.protocol import DataProto
from verl.workers.engine.base import Counts


class PolicyLoss:
    """A `LossFn` for the engine; `outputs` are the fields it needs."""

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        # Entropy with its gradient costs about a quarter of the step: only where it is part of the loss.
        self.outputs = ("log_probs", "entropy") if config.entropy_coeff else ("log_probs",)
        self.policy_loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)

    def __call__(
        self, output: dict[str, torch.Tensor], data: DataProto, counts: Counts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """All tensors [batch, response]."""
        config, mask = self.config, data.batch["response_mask"]
        share = global_share(mask, config.loss_agg_mode, counts.tokens, counts.sequences)
        loss, found = self.policy_loss_fn(
            old_log_prob=data.batch["old_log_probs"],
            log_prob=output["log_probs"],
            advantages=data.batch["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=data.batch["rollout_is_weights"] if "rollout_is_weights" in data.batch.keys() else None,
        )
        policy_loss = loss * share
        total = policy_loss
        tokens = mask.sum()
        metrics: dict[str, Any] = {name: (value * tokens, tokens) for name, value in found.items()}
        if config.entropy_coeff:
            scale = config.loss_scale_factor
            entropy = agg_loss(output["entropy"], mask, config.loss_agg_mode, loss_scale_factor=scale) * share
            total = total - config.entropy_coeff * entropy
            metrics["entropy_loss"] = _part(entropy)
        if config.use_kl_loss:
            kl = compute_kl_loss(
                output["log_probs"],
                data.batch["ref_log_prob"],
                mask,
                config.kl_loss_type,
                config.loss_agg_mode,
                config.loss_scale_factor,
            )
            total = total + config.kl_loss_coef * kl * share
            metrics["kl_loss"] = _part(kl * share)
        # Each micro-batch holds its part of the whole step's loss: the parts add up, over ranks too.
        metrics["policy_loss"] = _part(policy_loss)
        metrics["loss"] = _part(total)
        return total, metrics


def _part(value: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A term of a sum over micro-batches and ranks; `run_epochs` gives it its count."""
    return value.detach(), 0.0
