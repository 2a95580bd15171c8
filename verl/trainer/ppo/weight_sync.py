"""WeightSync: the rollout engines get the policy's weights, once per version, and only then requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from verl.single_controller.base.errors import WorkerCallError, WorkerDiedError
from verl.trainer.ppo.groups import WorkerGroups
from verl.utils.exceptions import causes
from verl.workers.rollout.base import EngineDiedError
from verl.workers.rollout.replica_states import Event
from verl.workers.sharding_manager import TransferLostError

# A death is known this soon after the sender has lost its receiver.
_BLAME_S = 10.0


class WeightSync:
    """From the actor's group to the rollout's: inside the processes that they share, else from group to group."""

    def __init__(self, groups: WorkerGroups, probe: Callable[[], None] = lambda: None, kv: str = "recompute") -> None:
        """`probe()` is called after every hand-over, and may ask the engines; what it raises is the hand-over's.
        `kv`: what becomes of it where requests go on after a hand-over (`trainer.partial_kv`)."""
        self._groups, self._probe, self._kv = groups, probe, kv
        self._holds = False

    def connect(self) -> None:
        """Let trainers and engines of different processes join one group for weights: both are called at once."""
        actor, rollout = self._groups.actor, self._groups.rollout
        if rollout is not actor:
            address, receivers = actor.transfer_address()[0], rollout.world_size
            for joining in [group.join_transfer(address, receivers) for group in (actor, rollout)]:
                joining.get()

    def let_go(self) -> None:
        """The step's answers are there: engines that share the trainer's devices need no weights until `hand_over`.

        A generation that stays open goes on beside training, or stands still where they take turns.
        """
        goes_on = False
        if self._groups.generation_open:
            self._holds = self._groups.takes_turns
            goes_on = not self._holds
            if self._holds:
                self._groups.rollout.hold_generation()
        if self._groups.frees_weights and not goes_on:
            self._groups.actor.free_rollout_weights()

    def hand_over(self, version: int) -> None:
        """Weights that the engines have already are not sent again. Requests under way go on with the new ones."""
        self._groups.replicas.advance(version)
        if self._groups.rollout is self._groups.actor:
            self._groups.actor.update_rollout_weights(version, self._kv)  # whose workers know what they have
        else:
            self._hand_over_between_groups(version)
        self.go_on()
        self._probe()

    def go_on(self) -> None:
        """After `let_go`: an open generation that stands still goes on, with the weights that it has."""
        if self._holds:
            self._groups.rollout.go_on_generating()
            self._holds = False

    def _hand_over_between_groups(self, version: int) -> None:
        replicas = self._groups.replicas
        if len(replicas.serving()) == len(replicas):
            return
        replicas.hear(Event.UPDATING)
        self._send(version)
        # Every engine has compared the fingerprints of what it received with the trainer's, or this is not reached.
        replicas.hear(Event.VERIFIED, version=version)

    def _send(self, version: int) -> None:
        """Both groups are called at once. Where a receiver dies, the sender's call ends too."""
        actor, rollout = self._groups.actor, self._groups.rollout
        sending, receiving = actor.send_weights(version), rollout.receive_weights(version, self._kv)
        failed: list[Exception] = []

        def listen() -> None:
            try:
                receiving.get()
            except Exception as error:  # noqa: BLE001 - raised below, by the thread that waits for the sender
                failed.append(error)
                if isinstance(error, WorkerDiedError):
                    rollout.shutdown()  # a sender over gloo waits until the connections are closed,
                    actor.abort_transfer()  # one over nccl until it is told

        listening = threading.Thread(target=listen, name="weights-received", daemon=True)
        listening.start()
        refused: list[Exception] = []
        try:
            sending.get()
        except WorkerCallError as error:
            refused.append(error)
        listening.join(_BLAME_S if refused else None)
        # A receiver that died tells more than the sender, who has only lost it.
        deaths = [each for each in failed if isinstance(each, WorkerDiedError) or engine_died(each)]
        if told := [*deaths, *refused, *failed]:
            raise told[0]


def engine_died(error: BaseException) -> bool:
    """Whether a worker lost its engine's own process."""
    return any(isinstance(cause, EngineDiedError) for cause in causes(error))


def is_lost_transfer(error: BaseException) -> bool:
    """Whether a hand-over failed because the trainer and its receivers have lost each other."""
    return any(isinstance(cause, TransferLostError) for cause in causes(error))
