"""ReplicaWeights and WeightSync: requests need verified weights of the trainer's version."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from verl.single_controller.base.worker_group import Failure, WorkerCallError, WorkerDiedError
from verl.trainer.ppo import weight_sync
from verl.trainer.ppo.weight_sync import ReplicaWeights, UnverifiedWeightsError, WeightSync
from verl.types.request import EngineDiedError
from verl.types.weights import WeightMismatchError, WeightsRefusedError
from verl.utils.transfer_group import TransferLostError


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


class Call:
    """A running call of a worker group, which raises `error`; the sender's waits for `released` first."""

    def __init__(self, error, released=None):
        self._error, self._released = error, released

    def get(self):
        assert self._released is None or self._released.wait(30)
        if self._error is not None:
            raise self._error


def call_error(error, role):
    return WorkerCallError(Failure.from_exception(error), role, 0, "host", "method")


def send(sender, receiver, blocked=False):
    """Send weights with a sender and a receiver that raise these errors. `blocked`: the sender only ends when its
    transfer is aborted. Return the raised error and whether the transfer was aborted."""
    aborted = threading.Event()
    actor = SimpleNamespace(
        send_weights=lambda version: Call(sender, aborted if blocked else None), abort_transfer=aborted.set
    )
    rollout = SimpleNamespace(receive_weights=lambda version, kv: Call(receiver), shutdown=lambda: None)
    sync = WeightSync(SimpleNamespace(actor=actor, rollout=rollout))
    with pytest.raises(RuntimeError) as raised:
        sync.sync(1)
    return raised.value, aborted.is_set()


LOST = call_error(TransferLostError("the connection was closed"), "actor")
REFUSAL = call_error(WeightsRefusedError("weights: version 1 was refused"), "actor")
NO_MEMORY = call_error(torch.OutOfMemoryError("no memory for the bucket"), "rollout")
ENGINE_DIED = call_error(EngineDiedError("the engine ended"), "rollout")
DIED = WorkerDiedError("the process ended", "rollout", 0, "host", "receive_weights")


def with_other_rank(error):
    """The lost connection of rank 0, which rank 1 has caused by `error`."""
    lost = Failure.from_exception(TransferLostError("the connection was closed"))
    return WorkerCallError(lost, "rollout", 0, "host", "method", [error])


OWN = call_error(FloatingPointError("the trainer broke"), "actor")
REFUSED = call_error(WeightMismatchError("weights: the trainer failed while sending"), "rollout")


@pytest.mark.parametrize(
    ("sender", "receiver", "cause"),
    [
        (LOST, NO_MEMORY, NO_MEMORY),
        (None, NO_MEMORY, NO_MEMORY),
        (LOST, DIED, DIED),
        (LOST, ENGINE_DIED, ENGINE_DIED),
        (REFUSAL, NO_MEMORY, NO_MEMORY),
        (LOST, with_other_rank(NO_MEMORY), NO_MEMORY),
        (LOST, with_other_rank(ENGINE_DIED), ENGINE_DIED),
        (OWN, REFUSED, OWN),
        (LOST, call_error(TransferLostError("the connection was closed"), "rollout"), LOST),
        (OWN, None, OWN),
    ],
)
def test_a_failed_transfer_raises_its_cause(sender, receiver, cause):
    assert send(sender, receiver)[0] is cause


@pytest.mark.parametrize("receiver", [NO_MEMORY, DIED])
def test_a_sender_that_waits_for_a_failed_receiver_is_aborted(receiver, monkeypatch):
    """A member of an NCCL group does not notice that another one has left."""
    monkeypatch.setattr(weight_sync, "_PEER_END_S", 0.2)
    assert send(LOST, receiver, blocked=True) == (receiver, True)
