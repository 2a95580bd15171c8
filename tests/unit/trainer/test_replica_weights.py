"""ReplicaWeights and WeightSync: requests need verified weights of the trainer's version."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl.trainer.ppo.weight_sync import ReplicaWeights, UnverifiedWeightsError, WeightSync


class RecordingSync(WeightSync):
    """Records the versions that it sends; `error` is raised instead."""

    def __init__(self):
        super().__init__(SimpleNamespace(actor="actor", rollout="rollout"))
        self.sent, self.error = [], None

    def _send(self, version):
        assert not self.replica_weights.are_current, "unknown while a sync runs"
        if self.error is not None:
            raise self.error
        self.sent.append(version)


def test_only_verified_weights_of_the_current_version_may_generate():
    weights = ReplicaWeights()
    with pytest.raises(UnverifiedWeightsError, match="None"):
        weights.require_current()
    weights.verified_version = 0
    weights.require_current()
    weights.current_version = 1
    with pytest.raises(UnverifiedWeightsError, match=r"^rollout: .*\b0;.*version 1\b"):
        weights.require_current()


def test_a_sync_sends_each_version_once_and_again_after_a_restart():
    sync = RecordingSync()
    weights = sync.replica_weights
    sync.sync(0)
    sync.sync(3)
    sync.sync(3)
    sync.require_current_weights()
    weights.verified_version = None  # as WorkerRecovery
    sync.sync(3)
    weights.require_current()
    assert sync.sent == [0, 3, 3]


def test_a_failed_sync_leaves_no_verified_version():
    sync = RecordingSync()
    weights = sync.replica_weights
    sync.sync(1)
    sync.error = RuntimeError("a receiver died")
    with pytest.raises(RuntimeError, match="a receiver died"):
        sync.sync(2)
    assert (weights.current_version, weights.verified_version) == (2, None)
