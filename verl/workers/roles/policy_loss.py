"""The actor's loss on one micro-batch: policy loss, entropy bonus, KL to the reference and to teachers; normalised by
global counts."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos import agg_loss, compute_kl_loss, get_policy_loss_fn, global_share, rows_of_trajectories
from verl.algos.kl import TOP_K_KLS, top_k_kl
from verl.algos.returns import keep
from verl.algos.rollout_correction import importance_weights
from verl.config import ActorConfig, RolloutCorrectionConfig
from verl.config.distillation import DistillationLossConfig
from verl.protocol import DataProto
from verl.workers.engine.base import Counts
from verl.workers.engine.common.micro_batches import trajectory_tokens

# Where a row of the micro-batch stands in the rank's batch: [batch].
ROW = "row_in_batch"


class PolicyLoss:
    """A `LossFn` for the engine; `outputs` are the fields it needs.

    With `own_old_log_probs` the policy is the old one while it runs (one optimizer step): its log-probs are the old
    ones, kept for the batch's rows (named by a column `ROW`), and the entropy is measured too. With `distillation` the
    KL to the teachers is part of it, or all of it that rewards would have been. With `correction` tokens are weighed by
    their ratio to the policy that drew them, whose log-probs are the old ones.
    """

    def __init__(
        self,
        config: ActorConfig,
        own_old_log_probs: bool = False,
        distillation: DistillationLossConfig | None = None,
        correction: RolloutCorrectionConfig | None = None,
    ) -> None:
        self.config, self.distillation, self.correction = config, distillation, correction
        # Entropy takes time: only where it is part of the loss, or where no other pass has measured it.
        self.outputs = ("log_probs", "entropy") if config.entropy_coeff or own_old_log_probs else ("log_probs",)
        if distillation is not None and distillation.over_top_tokens:
            self.outputs = (*self.outputs, "other_log_probs")
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
        config, mask, teachers = self.config, data.batch["response_mask"], self.distillation
        old_log_prob = self._old_log_probs(output, data)
        share = global_share(mask, config.loss_agg_mode, counts.tokens, counts.sequences)
        total, metrics = torch.zeros_like(share), self._measured(output, data)
        if teachers is None or teachers.use_task_rewards:
            loss, found = self._policy_loss(old_log_prob, output, data)
            total = loss * share
            metrics |= found | {"policy_loss": _part(total)}
        if config.entropy_coeff:
            scale = config.loss_scale_factor
            entropy = agg_loss(output["entropy"], mask, config.loss_agg_mode, loss_scale_factor=scale) * share
            total = total - config.entropy_coeff * entropy
            metrics["entropy_loss"] = _part(entropy)
        if config.use_kl_loss:
            kl = self._kl(output, data, "ref_log_prob", config.kl_loss_type)
            total = total + config.kl_loss_coef * kl * share
            metrics["kl_loss"] = _part(kl * share)
        if teachers is not None:
            kl = self._teacher_kl(output, data, teachers.loss_mode)
            total = total + teachers.distillation_loss_coef * kl * share
            metrics["distillation_loss"] = _part(kl * share)
        # Each micro-batch holds its part of the whole step's loss: the parts add up, over ranks too.
        metrics["loss"] = _part(total)
        return total, metrics

    def _policy_loss(
        self, old_log_prob: torch.Tensor, output: dict[str, torch.Tensor], data: DataProto
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        columns, mask = data.batch, data.batch["response_mask"]
        loss, found = self.policy_loss_fn(
            old_log_prob=old_log_prob,
            log_prob=output["log_probs"],
            advantages=columns["advantages"],
            response_mask=mask,
            loss_agg_mode=self.config.loss_agg_mode,
            config=self.config,
            rollout_is_weights=self._weights(old_log_prob, output, data),
        )
        tokens = mask.sum()
        return loss, {name: (value * tokens, tokens) for name, value in found.items()}

    def _weights(
        self, old_log_prob: torch.Tensor, output: dict[str, torch.Tensor], data: DataProto
    ) -> torch.Tensor | None:
        """Those that came with the batch, or of the policy as it is now."""
        columns, mask = data.batch, data.batch["response_mask"]
        if self.correction is None or self.correction.rollout_is is None:
            return columns["rollout_is_weights"] if "rollout_is_weights" in columns.keys() else None
        return importance_weights(output["log_probs"].detach() - old_log_prob, mask, self.correction)[0]

    def _measured(self, output: dict[str, torch.Tensor], data: DataProto) -> dict[str, Any]:
        """What is no part of the loss, per token."""
        columns, mask = data.batch, data.batch["response_mask"].bool()
        found = {}
        if self.own_old_log_probs:
            found["entropy"] = output["entropy"].detach()
        if "teacher_log_prob" in columns.keys():
            found["teacher_kl"] = output["log_probs"].detach() - columns["teacher_log_prob"]
        return {name: (torch.where(mask, value, 0.0).sum(), mask.sum()) for name, value in found.items()}

    def _kl(self, output: dict[str, torch.Tensor], data: DataProto, other: str, kind: str) -> torch.Tensor:
        """To the policy whose log-probs are in the column `other`."""
        config, columns = self.config, data.batch
        return compute_kl_loss(
            output["log_probs"],
            columns[other],
            columns["response_mask"],
            kind,
            config.loss_agg_mode,
            config.loss_scale_factor,
        )

    def _teacher_kl(self, output: dict[str, torch.Tensor], data: DataProto, kind: str) -> torch.Tensor:
        """From the sampled token, or over the teacher's likeliest ones."""
        if kind not in TOP_K_KLS:
            return self._kl(output, data, "teacher_log_prob", kind)
        config, columns, mask = self.config, data.batch, data.batch["response_mask"]
        kl = keep(top_k_kl(output["other_log_probs"], columns["teacher_top_log_probs"], kind), mask.bool())
        return agg_loss(kl, mask, config.loss_agg_mode, loss_scale_factor=config.loss_scale_factor)

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
