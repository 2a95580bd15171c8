"""Trainer and rollout in one process: buckets are copied straight into the engine."""

from __future__ import annotations

import time

from verl.workers.rollout.base import BaseRollout
from verl.workers.sharding_manager.base import (
    DEFAULT_BUCKET_BYTES,
    SentWeights,
    SyncStats,
    WeightSource,
    wanted_by_rank,
)

__all__ = ["InProcessTransfer"]


class InProcessTransfer:
    """Hands a training engine's weights to the rollout engine of the same process: what that wants, and no more."""

    def __init__(self, engine: WeightSource, rollout: BaseRollout, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """A collective: every training rank makes one, with the rollout of its own process."""
        self._engine, self._rollout, self._bucket_bytes = engine, rollout, bucket_bytes
        self._wanted = wanted_by_rank(rollout.wanted())

    def sync(self, version: int) -> SyncStats:
        """After this the rollout generates with exactly the trainer's weights, or it raises WeightMismatchError."""
        start = time.perf_counter()
        rollout = self._rollout
        rollout.begin_update(version, self._engine.manifest())
        sent = SentWeights(rollout.weight_dtype)
        try:
            for bucket in self._engine.buckets(rollout.weight_dtype, self._bucket_bytes, self._wanted):
                rollout.load_bucket(bucket)
                sent.add(bucket)
        except Exception as error:
            rollout.fail_update(error)
            raise
        rollout.finish_update(sent.fingerprint)
        return SyncStats(len(sent.fingerprint), sent.bytes, time.perf_counter() - start)
