"""ReplicaWeights: whether all rollout replicas have verified weights of the trainer's version.

`WeightSync.sync` sets the versions, restarts in `WorkerGroups` reset them, `Generator.generate` requires them. A lost
replica is restarted and readmitted by `WorkerRecovery`; requests are routed by `RolloutHosts` (rows) and `EngineClient`
(requests of agents).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReplicaWeights", "UnverifiedWeightsError"]


class UnverifiedWeightsError(RuntimeError):
    """Replicas were to generate with other weights than the trainer's current ones."""


@dataclass(slots=True)
class ReplicaWeights:
    """Versions of the weights of a rollout that has its own processes. A sync or a restart concerns all replicas."""

    current_version: int = 0
    """The trainer's version."""
    verified_version: int | None = None
    """Version of the replicas' weights, whose fingerprints match the trainer's; None: unknown (not synced since their
    start, or a sync is running or has failed)."""

    @property
    def are_current(self) -> bool:
        return self.verified_version == self.current_version

    def require_current(self) -> None:
        """Raise UnverifiedWeightsError unless all replicas have verified weights of the current version."""
        if not self.are_current:
            raise UnverifiedWeightsError(
                f"rollout: the verified version of the replicas' weights is {self.verified_version}; requests need"
                f" version {self.current_version}."
            )
