"""Trainer and rollout in one process: buckets go straight to the engine, wherever it runs."""

from __future__ import annotations

import time

import torch.distributed as dist

from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.bucket_layout import WholeTensors
from verl.workers.sharding_manager.base import (
    DEFAULT_BUCKET_BYTES,
    SentWeights,
    SyncStats,
    UntilError,
    WeightSource,
    wanted_by_rank,
)

__all__ = ["InProcessTransfer"]


class InProcessTransfer:
    """Hands a training engine's weights to the rollout of the same process: what that wants, and no more."""

    def __init__(self, engine: WeightSource, rollout: BaseRollout, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """A collective: every training rank makes one, with the rollout of its own process."""
        self._engine, self._rollout, self._bucket_bytes = engine, rollout, bucket_bytes
        self._wanted = wanted_by_rank(rollout.wanted(), engine.manifest)

    def sync(self, version: int) -> SyncStats:
        """After this the rollout generates with exactly the trainer's weights, or it raises WeightMismatchError.

        A collective, also where the engine of one rank fails: the others need that rank's part of every bucket.
        """
        start = time.perf_counter()
        rollout, manifest = self._rollout, self._engine.manifest()
        sent, steps, whole = SentWeights(rollout.weight_dtype), UntilError(), WholeTensors(manifest)
        rows_too = rollout.wanted() is not None
        steps.run(rollout.begin_update, version, manifest)
        begun = steps.error is None
        if steps.error is not None and not (dist.is_initialized() and dist.get_world_size() > 1):
            raise steps.error
        try:
            for bucket in self._engine.buckets(rollout.weight_dtype, self._bucket_bytes, self._wanted):
                steps.run(rollout.load_bucket, bucket if rows_too else whole.of(bucket))
                steps.run(sent.add, bucket)
        except Exception as error:
            if begun:
                rollout.fail_update(error)
            raise
        if steps.error is not None:
            if begun:
                rollout.fail_update(steps.error)
            raise steps.error
        rollout.finish_update(sent.fingerprint)
        return SyncStats(len(sent.fingerprint), sent.bytes, time.perf_counter() - start)
