"""Trainer and rollout in one process: buckets are copied straight into the engine."""

from __future__ import annotations

import time

from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.base import BaseRollout
from verl.workers.sharding_manager.base import DEFAULT_BUCKET_BYTES, SyncStats, WeightSource

__all__ = ["WeightSync"]


class WeightSync:
    """Hands a training engine's weights to the rollout engine of the same process."""

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes

    def sync(self, engine: WeightSource, rollout: BaseRollout, version: int) -> SyncStats:
        """After this the rollout generates with exactly the trainer's weights, or it raises WeightMismatchError.

        A collective: every training rank calls it, each with the rollout of its own process.
        """
        start = time.perf_counter()
        rollout.begin_update(version, engine.manifest())
        expected: dict[str, int] = {}
        size = 0
        for bucket in engine.buckets(rollout.weight_dtype, self.bucket_bytes):
            rollout.load_bucket(bucket)
            expected |= fingerprints(bucket, rollout.weight_dtype)
            size += sum(tensor.nbytes for tensor in bucket.values())
        rollout.finish_update(expected)
        return SyncStats(len(expected), size, time.perf_counter() - start)
