"""A trainer that keeps which prompts it trained on, and with whose tokens."""

from __future__ import annotations

from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class Notes(RayPPOTrainer):
    """`trained`: of each step, {prompt: {versions of its tokens}}. Stops after the step `last`, if that is set."""

    trained: list[dict[str, set[int]]]
    last: int | None = None

    def _after_step(self, batch: DataProto, metrics: dict[str, float]) -> None:
        super()._after_step(batch, metrics)
        versions, uids = batch.batch["rollout_versions"], batch.non_tensor_batch["uid"]
        of_rows = [set(row[row >= 0].tolist()) for row in versions]
        self.trained = [*getattr(self, "trained", []), dict[str, set[int]]()]
        for uid, found in zip(uids, of_rows, strict=True):
            self.trained[-1].setdefault(uid, set()).update(found)
        if self.global_steps == self.last:
            self.stop_requested.set()
