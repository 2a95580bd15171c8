"""A non-finite gradient never reaches the weights; too many in a row end the run with the cause and the remedy."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

SKIPPED = ("actor/skipped_steps", "critic/skipped_steps")


class NonFiniteError(RuntimeError):
    """Training was stopped because its gradients are not finite."""


class NonFiniteGuard:
    """Counts training steps in which an optimizer step was skipped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def skipped(self, metrics: Mapping[str, float]) -> bool:
        """Whether this step skipped an update."""
        return any(metrics.get(name, 0) > 0 for name in SKIPPED)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise after `limit` such steps in a row."""
        if not self.skipped(metrics):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        who = [name.split("/")[0] for name in SKIPPED if metrics.get(name, 0) > 0]
        logger.warning(
            "non-finite gradient in %s: the update was skipped, the weights are unchanged", " and ".join(who)
        )
        if self._in_a_row >= self._limit:
            raise NonFiniteError(
                f"the gradient of {' and '.join(who)} was not finite in {self._in_a_row} training steps in a row"
                " (trainer.max_nonfinite_steps). The weights are those before the first of them; batches are dumped."
                " Lower, in this order: actor_rollout_ref.actor.optim.lr (1e-6 → 5e-7), critic.optim.lr (→ 5e-6),"
                " actor_rollout_ref.actor.clip_ratio (→ 0.1), actor_rollout_ref.actor.grad_clip (→ 1.0),"
                " actor_rollout_ref.actor.ppo_epochs (→ 1); or add actor_rollout_ref.actor.use_kl_loss=True"
                " kl_loss_coef=0.01."
            )
