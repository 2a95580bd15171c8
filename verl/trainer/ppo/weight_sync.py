"""WeightSync: the rollout engines get the policy's weights, once per version."""

from __future__ import annotations

from verl.trainer.ppo.groups import WorkerGroups


class WeightSync:
    """From the actor's group to the rollout's: inside the processes that they share, else from group to group."""

    def __init__(self, groups: WorkerGroups) -> None:
        self._groups = groups
        self._sent: int | None = None

    def connect(self) -> None:
        """Let trainers and engines of different processes join one group for weights: both are called at once."""
        actor, rollout = self._groups.actor, self._groups.rollout
        if rollout is not actor:
            address, receivers = actor.transfer_address()[0], rollout.world_size
            for joining in [group.join_transfer(address, receivers) for group in (actor, rollout)]:
                joining.get()

    def hand_over(self, version: int) -> None:
        """Weights that the engines have already are not sent again."""
        actor, rollout = self._groups.actor, self._groups.rollout
        if rollout is actor:
            actor.update_rollout_weights(version)  # whose workers know what they have
        elif version != self._sent:
            for call in (actor.send_weights(version), rollout.receive_weights(version)):
                call.get()
            self._sent = version
