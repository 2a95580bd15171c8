"""PolicyLoss: policy loss, entropy bonus, KL to the reference and to teachers, normalised by global counts."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos import agg_loss, compute_kl_loss, get_policy_loss_fn, global_share, rows_of_trajectories
from verl.algos.kl import TOP_K_KLS, top_k_kl
from verl.algos.masked_ops import apply_mask
from verl.algos.rollout_correction import importance_weights
from verl.config import ActorConfig, RolloutCorrectionConfig
from verl.config.ppo import DistillationLossConfig
from verl.protocol import DataProto
from verl.workers.engine.base import Counts
from verl.workers.engine.common.micro_batches import trajectory_tokens

# Column [batch]: index of the row in the rank's batch.
ROW = "row_in_batch"


class PolicyLoss:
    """A `LossFn` of the actor; `outputs` are the fields it needs.

    - `own_old_log_probs`: the update is one optimizer step, so the old policy is the current one. Its log-probs are
      used as old log-probs and recorded by row (column `ROW`); the entropy is measured, too.
    - `distillation`: adds the KL to the teachers; without `use_task_rewards`, the KL replaces the policy loss.
    - `correction`: weights tokens by their ratio to the rollout policy, whose log-probs are in the column
      `denominator_log_probs` or, without this column, are the old log-probs.
    """

    def __init__(
        self,
        config: ActorConfig,
        own_old_log_probs: bool = False,
        distillation: DistillationLossConfig | None = None,
        correction: RolloutCorrectionConfig | None = None,
    ) -> None:
        self.config, self.distillation, self.correction = config, distillation, correction
        # Entropy is expensive: computed only if it is part of the loss or, without gradients, if no other pass
        # measures it.
        self._entropy = "entropy" if config.entropy_coeff else "entropy_value"
        self.outputs = ("log_probs", self._entropy) if config.entropy_coeff or own_old_log_probs else ("log_probs",)
        if distillation is not None and distillation.over_top_tokens:
            self.outputs = (*self.outputs, "other_log_probs")
        self.own_old_log_probs = own_old_log_probs
        self._recorded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.policy_loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)

    def __call__(
        self, output: dict[str, torch.Tensor], data: DataProto, counts: Counts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """All tensors are [batch, response], except `trajectory_tokens` [batch]."""
        with rows_of_trajectories(trajectory_tokens(data)):
            return self._loss(output, data, counts)

    def _loss(
        self, output: dict[str, torch.Tensor], data: DataProto, counts: Counts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        config, mask, teachers = self.config, data.batch["response_mask"], self.distillation
        old_log_prob = self._old_log_probs(output, data)
        share = global_share(mask, config.loss_agg_mode, counts.tokens, counts.sequences)
        total, metrics = torch.zeros_like(share), self._token_metrics(output, data)
        if teachers is None or teachers.use_task_rewards:
            loss, loss_metrics = self._policy_loss(old_log_prob, output, data)
            total = loss * share
            metrics |= loss_metrics | {"policy_loss": _loss_term(total)}
        if config.entropy_coeff:
            scale = config.loss_scale_factor
            entropy = agg_loss(output["entropy"], mask, config.loss_agg_mode, loss_scale_factor=scale) * share
            total = total - config.entropy_coeff * entropy
            metrics["entropy_loss"] = _loss_term(entropy)
        if config.use_kl_loss:
            kl = self._kl(output, data, "ref_log_prob", config.kl_loss_type)
            total = total + config.kl_loss_coef * kl * share
            metrics["kl_loss"] = _loss_term(kl * share)
        if teachers is not None:
            kl = self._teacher_kl(output, data, teachers.loss_mode)
            total = total + teachers.distillation_loss_coef * kl * share
            metrics["distillation_loss"] = _loss_term(kl * share)
        # A term of the step's loss, which is the sum over micro-batches and ranks.
        metrics["loss"] = _loss_term(total)
        return total, metrics

    def _policy_loss(
        self, old_log_prob: torch.Tensor, output: dict[str, torch.Tensor], data: DataProto
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        columns, mask = data.batch, data.batch["response_mask"]
        loss, metrics = self.policy_loss_fn(
            old_log_prob=old_log_prob,
            log_prob=output["log_probs"],
            advantages=columns["advantages"],
            response_mask=mask,
            loss_agg_mode=self.config.loss_agg_mode,
            config=self.config,
            rollout_is_weights=self._importance_weights(old_log_prob, output, data),
        )
        tokens = mask.sum()
        return loss, {name: (value * tokens, tokens) for name, value in metrics.items()}

    def _importance_weights(
        self, old_log_prob: torch.Tensor, output: dict[str, torch.Tensor], data: DataProto
    ) -> torch.Tensor | None:
        """Return the weights in the batch or, with `correction`, the weights under the current policy."""
        columns, mask = data.batch, data.batch["response_mask"]
        if self.correction is None or self.correction.rollout_is is None:
            return columns["rollout_is_weights"] if "rollout_is_weights" in columns.keys() else None
        rollout = columns["denominator_log_probs"] if "denominator_log_probs" in columns.keys() else old_log_prob
        log_ratio = torch.where(rollout.isnan(), 0.0, output["log_probs"].detach() - rollout)
        return importance_weights(log_ratio, mask, self.correction)[0]

    def _token_metrics(self, output: dict[str, torch.Tensor], data: DataProto) -> dict[str, Any]:
        """Return metrics per token that are not part of the loss."""
        columns, mask = data.batch, data.batch["response_mask"].bool()
        per_token = {}
        if self.own_old_log_probs:
            per_token["entropy"] = output[self._entropy].detach()
        if "teacher_log_prob" in columns.keys():
            per_token["teacher_kl"] = output["log_probs"].detach() - columns["teacher_log_prob"]
        return {name: (torch.where(mask, value, 0.0).sum(), mask.sum()) for name, value in per_token.items()}

    def _kl(self, output: dict[str, torch.Tensor], data: DataProto, other: str, kind: str) -> torch.Tensor:
        """Return the KL to the policy whose log-probs are in the column `other`."""
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
        """Return the KL to the teacher, from the sampled token or over the teacher's most likely tokens."""
        if kind not in TOP_K_KLS:
            return self._kl(output, data, "teacher_log_prob", kind)
        config, columns, mask = self.config, data.batch, data.batch["response_mask"]
        kl = apply_mask(top_k_kl(output["other_log_probs"], columns["teacher_top_log_probs"], kind), mask.bool())
        return agg_loss(kl, mask, config.loss_agg_mode, loss_scale_factor=config.loss_scale_factor)

    def old_log_probs(self, rows: int) -> torch.Tensor:
        """Return the recorded log-probs of all rows of the batch: [rows, response], on the CPU."""
        assert self._recorded, "requires own_old_log_probs and a pass"
        indices, values = (torch.cat(parts).cpu() for parts in zip(*self._recorded, strict=True))
        log_probs = values.new_zeros((rows, values.shape[1]))
        log_probs[indices] = values
        return log_probs

    def _old_log_probs(self, output: dict[str, torch.Tensor], data: DataProto) -> torch.Tensor:
        if not self.own_old_log_probs:
            return data.batch["old_log_probs"]
        log_probs = output["log_probs"].detach()
        self._recorded.append((data.batch[ROW], log_probs))
        return log_probs


def _loss_term(value: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Return the metric of a term of the step's loss, which is the sum over micro-batches and ranks."""
    return value.detach(), None


def require_experts(actor: ActorConfig, data: DataProto, modes: tuple[str, ...]) -> None:
    """Raise ValueError if `router_replay.mode` is one of `modes` and the batch has no experts to replay."""
    mode = actor.router_replay.mode
    if mode in modes and "routed_experts" not in data.batch.keys():
        source = "compute_log_prob" if mode == "R2" else "a rollout engine that reports experts"
        raise ValueError(
            f"actor_rollout_ref.actor.router_replay.mode = {mode}: the batch has no column routed_experts. Pass the"
            f" column of {source}, or set the mode to disabled."
        )
