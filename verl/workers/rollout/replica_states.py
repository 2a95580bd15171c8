"""The state machine of rollout replicas: which replicas may get requests, and how a dead replica is readmitted.

    restarting ── started ──► stale ── verified ──► healthy ◄── responded ── suspect
        ▲                       ▲                    │  │                       ▲
        └── restart ── dead     └──── new version ───┘  └───── unresponsive ────┘

`died` leads from every state to dead, and only `restart` leads out of dead. A replica gets requests only while it is
healthy: its process responds, and its weights were verified to have the current version.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["NoReplicaError", "Replica", "ReplicaEvent", "ReplicaState", "Replicas", "next_replica"]


class ReplicaState(Enum):
    """State of a replica."""

    RESTARTING = "restarting"
    """Its processes are being started, for the first time or after a death."""
    STALE = "stale"
    """It runs, but its weights are not verified to be of the current version."""
    HEALTHY = "healthy"
    """It may get requests."""
    SUSPECT = "suspect"
    """It did not respond in time: no requests until it responds."""
    DEAD = "dead"
    """One of its processes has ended."""


class ReplicaEvent(Enum):
    """An observation about a replica."""

    STARTED = "started"
    VERIFIED = "verified"
    """A weight update has finished, and the fingerprints of all weights match the trainer's."""
    UPDATING = "updating"
    """A weight update has begun: until it is verified, the weights have no version."""
    UNRESPONSIVE = "unresponsive"
    RESPONDED = "responded"
    DIED = "died"
    RESTART = "restart"


@dataclass(frozen=True)
class Replica:
    """One replica."""

    state: ReplicaState = ReplicaState.RESTARTING
    version: int | None = None
    """Last verified version of its weights; None: unknown."""
    incarnation: int = 0
    """Number of restarts. Events of an earlier incarnation are ignored."""


# Pairs that are not listed change nothing: events may be late or repeated.
_TRANSITIONS = {
    (ReplicaState.RESTARTING, ReplicaEvent.STARTED): ReplicaState.STALE,
    (ReplicaState.STALE, ReplicaEvent.VERIFIED): ReplicaState.HEALTHY,
    (ReplicaState.STALE, ReplicaEvent.UNRESPONSIVE): ReplicaState.SUSPECT,
    (ReplicaState.HEALTHY, ReplicaEvent.VERIFIED): ReplicaState.HEALTHY,
    (ReplicaState.HEALTHY, ReplicaEvent.UPDATING): ReplicaState.STALE,
    (ReplicaState.HEALTHY, ReplicaEvent.UNRESPONSIVE): ReplicaState.SUSPECT,
    (ReplicaState.SUSPECT, ReplicaEvent.UPDATING): ReplicaState.SUSPECT,
    (ReplicaState.SUSPECT, ReplicaEvent.RESPONDED): ReplicaState.HEALTHY,
    (ReplicaState.DEAD, ReplicaEvent.RESTART): ReplicaState.RESTARTING,
} | {(state, ReplicaEvent.DIED): ReplicaState.DEAD for state in ReplicaState}


def next_replica(
    replica: Replica, event: ReplicaEvent, incarnation: int, current_version: int, verified_version: int | None = None
) -> Replica:
    """The replica after an event of its `incarnation`. `current_version`: the trainer's; `verified_version`: that of a
    `VERIFIED` event."""
    state = _TRANSITIONS.get((replica.state, event))
    if state is None or incarnation != replica.incarnation:
        return replica
    if event is ReplicaEvent.VERIFIED:
        replica = replace(replica, version=verified_version)
    elif event in (ReplicaEvent.DIED, ReplicaEvent.RESTART, ReplicaEvent.UPDATING):
        replica = replace(replica, version=None)
    if event is ReplicaEvent.RESTART:
        replica = replace(replica, incarnation=incarnation + 1)
    if state is ReplicaState.HEALTHY and replica.version != current_version:
        state = ReplicaState.STALE
    return replace(replica, state=state)


class NoReplicaError(RuntimeError):
    """A replica that is not healthy was to get requests."""


class Replicas:
    """The replicas of a run, by number, and the version that their weights must have. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._replicas = [Replica() for _ in range(count)]
        self.current_version = 0
        """The trainer's version."""
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Replica:
        return self._replicas[number]

    def __len__(self) -> int:
        return len(self._replicas)

    def advance(self, version: int) -> None:
        """Set the trainer's version; healthy replicas with another version become stale."""
        with self._lock:
            self.current_version = version
            self._replicas = [
                replace(replica, state=ReplicaState.STALE)
                if replica.state is ReplicaState.HEALTHY and replica.version != version
                else replica
                for replica in self._replicas
            ]

    def apply(
        self,
        event: ReplicaEvent,
        numbers: Iterable[int] | None = None,
        incarnation: int | None = None,
        version: int | None = None,
    ) -> None:
        """Apply an event to these replicas (None: all). `incarnation`: of the event (None: the current
        incarnation); `version`: the verified version."""
        with self._lock:
            for number in range(len(self._replicas)) if numbers is None else numbers:
                replica = self._replicas[number]
                of_incarnation = replica.incarnation if incarnation is None else incarnation
                self._replicas[number] = next_replica(replica, event, of_incarnation, self.current_version, version)

    def healthy(self) -> list[int]:
        """The numbers of the replicas that may get requests."""
        return [number for number, replica in enumerate(self._replicas) if replica.state is ReplicaState.HEALTHY]

    def require_all_healthy(self) -> None:
        """Raise NoReplicaError unless all replicas are healthy."""
        problems = [
            f"{number} is {replica.state.value} (weights of version {replica.version})"
            for number, replica in enumerate(self._replicas)
            if replica.state is not ReplicaState.HEALTHY
        ]
        if problems:
            raise NoReplicaError(
                f"rollout: replica {', '.join(problems)}; requests need verified weights of version"
                f" {self.current_version}."
            )
