"""The actor's loss on one micro-batch: policy loss, entropy bonus, KL to the reference; normalised by global counts."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos import agg_loss, compute_kl_loss, get_policy_loss_fn, global_share, rows_of_trajectories
from verl.config import ActorConfig
from verl.protocol import DataProto
from verl.workers.engine.base import Counts
from verl.workers.engine.common.micro_batches import trajectory_tokens

# Where a row of the micro-batch stands in the rank's batch: [batch].
ROW = "row_in_batch"


class PolicyLoss:
    """A `LossFn` for the engine; `outputs` are the fields it needs.

    With `own_old_log_probs` the policy is the old one while it runs (one optimizer step): its log-probs are the old
    ones, kept for the batch's rows (named by a column `ROW`), and the entropy is measured too.
    """

    def __init__(self, config: ActorConfig, own_old_log_probs: bool = False) -> None:
        self.config = config
        # Entropy takes time: only where it is part of the loss, or where no other pass has measured it.
        self.outputs = ("log_probs", "entropy") if config.entropy_coeff or own_old_log_probs else ("log_probs",)
        self.own_old_log_probs = own_old_log_probs
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.policy_loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)

    def __call__(
        self, output: dict[str, torch.Tensor], data: DataProto, counts: Counts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """All tensors [batch, response], but for `trajectory_tokens` [batch]."""
        with rows_of_trajectories(trajectory_tokens(data)):
            return self._loss(output, data, counts)

    def _loss(
        self, output: dict[str, torch.Tensor], data: DataProto, counts: Counts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        config, mask = self.config, data.batch["response_mask"]
        old_log_prob = self._old_log_probs(output, data)
        share = global_share(mask, config.loss_agg_mode, counts.tokens, counts.sequences)
        loss, found = self.policy_loss_fn(
            old_log_prob=old_log_prob,
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
        if self.own_old_log_probs:
            metrics["entropy"] = (torch.where(mask.bool(), output["entropy"].detach(), 0.0).sum(), tokens)
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

    def old_log_probs(self, rows: int) -> torch.Tensor:
        """Those that the pass gave itself, for all rows of the batch: [rows, response], on the CPU."""
        assert self._kept, "only with own_old_log_probs, and after a pass"
        places, values = (torch.cat(parts).cpu() for parts in zip(*self._kept, strict=True))
        whole = values.new_zeros((rows, values.shape[1]))
        whole[places] = values
        return whole

    def _old_log_probs(self, output: dict[str, torch.Tensor], data: DataProto) -> torch.Tensor:
        if not self.own_old_log_probs:
            return data.batch["old_log_probs"]
        log_probs = output["log_probs"].detach()
        self._kept.append((data.batch[ROW], log_probs))
        return log_probs


def _part(value: torch.Tensor) -> tuple[torch.Tensor, None]:
    """A term of a sum over micro-batches and ranks; `run_epochs` gives it its count."""
    return value.detach(), None
