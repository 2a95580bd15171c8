"""The states of a rollout replica: which may answer requests, and how one that died comes back. Pure: no processes.

    restarting ── started ──► stale ── verified ──► healthy ◄── answered ── suspect
        ▲                       ▲                    │  │                      ▲
        └── restart ── dead     └──── new version ───┘  └─────── silent ───────┘

`died` leads from every state to dead, and out of dead only `restart` does. A replica gets requests while it is healthy:
its process answers, and its weights were verified to be those of the current version. Nothing else admits it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["Event", "NoReplicaError", "Replica", "Replicas", "State", "after"]


class State(Enum):
    """Where a replica stands."""

    RESTARTING = "restarting"
    """Its processes are being started: the first time, or in the place of dead ones."""
    STALE = "stale"
    """It runs, without the weights of the current version, or nobody has verified that it has them."""
    HEALTHY = "healthy"
    """It may get requests."""
    SUSPECT = "suspect"
    """It has not answered in time: no requests until it does."""
    DEAD = "dead"
    """A process of it is gone."""


class Event(Enum):
    """What is heard of a replica."""

    STARTED = "started"
    VERIFIED = "verified"
    """An update ended, and the fingerprints of all its weights are the trainer's."""
    UPDATING = "updating"
    """An update began: until it is verified, its weights are of no version."""
    SILENT = "silent"
    ANSWERED = "answered"
    DIED = "died"
    RESTART = "restart"


@dataclass(frozen=True)
class Replica:
    """One replica. `life` counts its starts: what is heard of an earlier life says nothing of this one."""

    state: State = State.RESTARTING
    version: int | None = None
    """Of its weights, as last verified; None: not known."""
    life: int = 0


# What is not here changes nothing: news may come late, or twice.
_NEXT = {
    (State.RESTARTING, Event.STARTED): State.STALE,
    (State.STALE, Event.VERIFIED): State.HEALTHY,
    (State.STALE, Event.SILENT): State.SUSPECT,
    (State.HEALTHY, Event.VERIFIED): State.HEALTHY,
    (State.HEALTHY, Event.UPDATING): State.STALE,
    (State.HEALTHY, Event.SILENT): State.SUSPECT,
    (State.SUSPECT, Event.UPDATING): State.SUSPECT,
    (State.SUSPECT, Event.ANSWERED): State.HEALTHY,
    (State.DEAD, Event.RESTART): State.RESTARTING,
} | {(state, Event.DIED): State.DEAD for state in State}


def after(replica: Replica, event: Event, life: int, current: int, version: int | None = None) -> Replica:
    """The replica after an event of its `life`. `current` is the trainer's version; `version` what was verified."""
    state = _NEXT.get((replica.state, event))
    if state is None or life != replica.life:
        return replica
    if event is Event.VERIFIED:
        replica = replace(replica, version=version)
    elif event in (Event.DIED, Event.RESTART, Event.UPDATING):
        replica = replace(replica, version=None)
    if event is Event.RESTART:
        replica = replace(replica, life=life + 1)
    if state is State.HEALTHY and replica.version != current:
        state = State.STALE
    return replace(replica, state=state)


class NoReplicaError(RuntimeError):
    """Requests were to be sent to a replica that may not answer them."""


class Replicas:
    """The replicas of a run, by number, and the version that they are to have. May be used from several threads."""

    def __init__(self, count: int) -> None:
        self._replicas = [Replica() for _ in range(count)]
        self.current = 0
        """The trainer's version: what they are to have."""
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Replica:
        return self._replicas[number]

    def __len__(self) -> int:
        return len(self._replicas)

    def advance(self, version: int) -> None:
        """The trainer's weights are now these: whoever has others is stale."""
        with self._lock:
            self.current = version
            healthy, stale = State.HEALTHY, State.STALE
            self._replicas = [
                replace(each, state=stale) if each.state is healthy and each.version != version else each
                for each in self._replicas
            ]

    def hear(
        self, event: Event, numbers: Iterable[int] | None = None, life: int | None = None, version: int | None = None
    ) -> None:
        """Something happened to these replicas (None: to all), in their `life` (None: the present one)."""
        with self._lock:
            for number in range(len(self._replicas)) if numbers is None else numbers:
                known = self._replicas[number]
                self._replicas[number] = after(
                    known, event, known.life if life is None else life, self.current, version
                )

    def serving(self) -> list[int]:
        """Those that may get requests."""
        return [number for number, each in enumerate(self._replicas) if each.state is State.HEALTHY]

    def require_all(self) -> None:
        """Raise where one of them may not get requests."""
        idle = {number: each for number, each in enumerate(self._replicas) if each.state is not State.HEALTHY}
        if idle:
            said = ", ".join(
                f"{number} is {each.state.value} (weights of version {each.version})" for number, each in idle.items()
            )
            raise NoReplicaError(f"rollout: replica {said}; requests need verified weights of version {self.current}.")
