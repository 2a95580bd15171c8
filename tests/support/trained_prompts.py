"""A trainer that records its prompts and the weight versions of their tokens."""

from __future__ import annotations

from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class PromptRecordingTrainer(RayPPOTrainer):
    """`trained`: {prompt uid: versions of its tokens} per step. Stops after step `last` if it is set."""

    trained: list[dict[str, set[int]]]
    last: int | None = None

    def _record_step(self, batch: DataProto, metrics: dict[str, float]) -> None:
        super()._record_step(batch, metrics)
        versions, uids = batch.batch["rollout_versions"], batch.non_tensor_batch["uid"]
        versions_of_rows = [set(row[row >= 0].tolist()) for row in versions]
        self.trained = [*getattr(self, "trained", []), dict[str, set[int]]()]
        for uid, row_versions in zip(uids, versions_of_rows, strict=True):
            self.trained[-1].setdefault(uid, set()).update(row_versions)
        if self.global_steps == self.last:
            self.stop_requested.set()
