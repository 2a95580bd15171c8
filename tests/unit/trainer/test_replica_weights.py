"""ReplicaWeights and WeightSync: requests need verified weights of the trainer's version."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl.trainer.ppo.replica_weights import ReplicaWeights, UnverifiedWeightsError
from verl.trainer.ppo.weight_sync import WeightSync


class RecordingSync(WeightSync):
    """Records the versions that it sends; `error` is raised instead."""

    def __init__(self, weights):
        self._groups = SimpleNamespace(replica_weights=weights, actor="actor", rollout="rollout")
        self._paused, self.sent, self.error = False, [], None

    def _send(self, version):
        assert not self._groups.replica_weights.are_current, "unknown while a sync runs"
        if self.error is not None:
            raise self.error
        self.sent.append(version)

    def _probe(self):
        pass


def test_only_verified_weights_of_the_current_version_may_generate():
    weights = ReplicaWeights()
    with pytest.raises(UnverifiedWeightsError, match="None"):
        weights.require_current()
    weights.verified_version = 0
    weights.require_current()
    weights.current_version = 1
    with pytest.raises(UnverifiedWeightsError, match=r"is 0;.*version 1"):
        weights.require_current()


def test_a_sync_sends_each_version_once_and_again_after_a_restart():
    weights = ReplicaWeights()
    sync = RecordingSync(weights)
    sync.sync(0)
    sync.sync(3)
    sync.sync(3)
    weights.require_current()
    weights.verified_version = None  # as WorkerGroups.restart
    sync.sync(3)
    weights.require_current()
    assert sync.sent == [0, 3, 3]


def test_a_failed_sync_leaves_no_verified_version():
    weights = ReplicaWeights()
    sync = RecordingSync(weights)
    sync.sync(1)
    sync.error = RuntimeError("a receiver died")
    with pytest.raises(RuntimeError, match="a receiver died"):
        sync.sync(2)
    assert (weights.current_version, weights.verified_version) == (2, None)
