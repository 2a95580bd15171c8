"""WeightSync: send the weights of the policy to the rollout engines, once per version, before they get requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from verl.single_controller.base.errors import WorkerCallError, WorkerDiedError
from verl.trainer.ppo.groups import WorkerGroups
from verl.utils.exceptions import cause_chain
from verl.workers.rollout.base import EngineDiedError
from verl.workers.rollout.replica_states import ReplicaEvent
from verl.workers.sharding_manager import TransferLostError

# Time until the death of a receiver is known after its sender has lost the connection.
_DEATH_REPORT_S = 10.0


class WeightSync:
    """Syncs weights from the actor's worker group to the rollout's: within shared processes, or between groups."""

    def __init__(self, groups: WorkerGroups, probe: Callable[[], None] = lambda: None, kv: str = "recompute") -> None:
        """`probe()` is called after every sync and may send requests to the engines; its errors are raised by `sync`.
        `kv`: handling of the KV cache of requests that continue after a sync (`trainer.partial_kv`)."""
        self._groups, self._probe, self._kv = groups, probe, kv
        self._paused = False

    def connect(self) -> None:
        """Create the process group for weight transfer if trainer and engines run in different processes."""
        actor, rollout = self._groups.actor, self._groups.rollout
        if rollout is not actor:
            address, receivers = actor.transfer_address()[0], rollout.world_size
            for joining in [group.join_transfer(address, receivers) for group in (actor, rollout)]:
                joining.get()

    def release_weights(self) -> None:
        """After the rollout of a step: free the weights of engines that share devices with the trainer until `sync`.

        An open generation continues during training, or is paused if it has to take turns with it.
        """
        generates = False
        if self._groups.generation_open:
            self._paused = self._groups.takes_turns
            generates = not self._paused
            if self._paused:
                self._groups.rollout.pause_rollout()
        if self._groups.frees_weights and not generates:
            self._groups.actor.free_rollout_weights()

    def sync(self, version: int) -> None:
        """Bring all engines to this version; engines that have it are skipped. Running requests continue with it."""
        self._groups.replicas.advance(version)
        if self._groups.rollout is self._groups.actor:
            self._groups.actor.update_rollout_weights(version, self._kv)  # the workers skip a version they have
        else:
            self._sync_between_groups(version)
        self.resume_generation()
        self._probe()

    def resume_generation(self) -> None:
        """Resume a generation that `release_weights` has paused, with the weights that its engines have."""
        if self._paused:
            self._groups.rollout.resume_rollout()
            self._paused = False

    def _sync_between_groups(self, version: int) -> None:
        replicas = self._groups.replicas
        if len(replicas.healthy()) == len(replicas):
            return
        replicas.apply(ReplicaEvent.UPDATING)
        self._send(version)
        # Every engine has verified the fingerprints of the received weights; otherwise `_send` has raised.
        replicas.apply(ReplicaEvent.VERIFIED, version=version)

    def _send(self, version: int) -> None:
        """Run the sending and the receiving call concurrently. If a receiver dies, the sender's call ends too."""
        actor, rollout = self._groups.actor, self._groups.rollout
        sending, receiving = actor.send_weights(version), rollout.receive_weights(version, self._kv)
        receiver_errors: list[Exception] = []

        def receive() -> None:
            try:
                receiving.get()
            except Exception as error:  # noqa: BLE001 - raised below, by the thread that waits for the sender
                receiver_errors.append(error)
                if isinstance(error, WorkerDiedError):
                    rollout.shutdown()  # a gloo sender blocks until the connections are closed
                    actor.abort_transfer()  # an NCCL sender blocks until its communicator is aborted

        receiver = threading.Thread(target=receive, name="weights-received", daemon=True)
        receiver.start()
        sender_errors: list[Exception] = []
        try:
            sending.get()
        except WorkerCallError as error:
            sender_errors.append(error)
        receiver.join(_DEATH_REPORT_S if sender_errors else None)
        # The death of a receiver is the cause; the sender's error only reports the lost connection.
        deaths = [error for error in receiver_errors if isinstance(error, WorkerDiedError) or engine_died(error)]
        if errors := [*deaths, *sender_errors, *receiver_errors]:
            raise errors[0]


def engine_died(error: BaseException) -> bool:
    """Return whether a worker lost the separate process of its engine."""
    return any(isinstance(cause, EngineDiedError) for cause in cause_chain(error))


def is_lost_transfer(error: BaseException) -> bool:
    """Return whether a weight sync failed because the connection between trainer and receivers was lost."""
    return any(isinstance(cause, TransferLostError) for cause in cause_chain(error))
