"""The states of a rollout replica: the table, and laws over any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.workers.rollout.replica_states import (
    NoReplicaError,
    Replica,
    ReplicaEvent,
    Replicas,
    ReplicaState,
    next_replica,
)

S, E = ReplicaState, ReplicaEvent
VERSION = 7
# (before, event) -> after, for weights of the current version; pairs that are not listed change nothing.
TABLE = {
    (S.RESTARTING, E.STARTED): S.STALE,
    (S.STALE, E.VERIFIED): S.HEALTHY,
    (S.STALE, E.UNRESPONSIVE): S.SUSPECT,
    (S.HEALTHY, E.VERIFIED): S.HEALTHY,
    (S.HEALTHY, E.UPDATING): S.STALE,
    (S.HEALTHY, E.UNRESPONSIVE): S.SUSPECT,
    (S.SUSPECT, E.RESPONDED): S.HEALTHY,
    (S.DEAD, E.RESTART): S.RESTARTING,
    **{(state, E.DIED): S.DEAD for state in S},
}


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("event", E)
def test_every_event_in_every_state(state, event):
    before = Replica(state, VERSION if state in (S.HEALTHY, S.SUSPECT) else None, incarnation=2)
    found = next_replica(before, event, 2, VERSION, VERSION)
    assert found.state is TABLE.get((state, event), state)
    assert next_replica(before, event, 1, VERSION, VERSION) == before, "of an earlier incarnation"


def test_only_verified_weights_of_the_current_version_admit():
    replicas = Replicas(3)
    replicas.advance(4)
    replicas.apply(E.STARTED)
    replicas.apply(E.VERIFIED, [0, 1], version=4)
    replicas.apply(E.VERIFIED, [2], version=3)
    assert replicas.healthy() == [0, 1]
    with pytest.raises(NoReplicaError, match=r"2 is stale \(weights of version 3\).*verified weights of version 4"):
        replicas.require_all_healthy()
    replicas.apply(E.UNRESPONSIVE, [0])
    replicas.advance(5)
    assert replicas.healthy() == []
    replicas.apply(E.VERIFIED, [1, 2], version=5)
    replicas.apply(E.RESPONDED, [0])
    assert replicas[0].state is S.STALE, "it responds again, with the weights of version 4"
    assert replicas.healthy() == [1, 2]


def test_events_of_an_earlier_incarnation_are_ignored():
    replicas = Replicas(1)
    replicas.apply(E.STARTED)
    replicas.apply(E.DIED)
    replicas.apply(E.RESTART)
    replicas.apply(E.STARTED)
    replicas.apply(E.VERIFIED, incarnation=0, version=0)  # by the process that died
    assert replicas.healthy() == []
    replicas.apply(E.VERIFIED, version=0)
    assert replicas.healthy() == [0]
    replicas.apply(E.DIED, incarnation=0)
    assert replicas.healthy() == [0]


events = st.tuples(st.sampled_from(E), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3))


@given(st.lists(st.one_of(events, st.integers(0, 3)), max_size=60))
def test_a_healthy_replica_was_verified_for_the_current_version_in_this_incarnation(sequence):
    """After its last start, update and new version, it was verified, by an independent account of the events."""
    replicas, current = Replicas(2), 0
    verified: dict[int, int | None] = {0: None, 1: None}
    paths: dict[int, list[ReplicaState]] = {0: [S.RESTARTING], 1: [S.RESTARTING]}
    for item in sequence:
        if isinstance(item, int):
            current = item
            replicas.advance(current)
        else:
            event, number, incarnation, version = item[0], item[1] % 2, item[2], item[3]
            before = replicas[number]
            replicas.apply(event, [number], incarnation, version)
            if before.incarnation == incarnation and event in (E.DIED, E.RESTART, E.UPDATING):
                verified[number] = None
            elif before.incarnation == incarnation and event is E.VERIFIED and before.state in (S.STALE, S.HEALTHY):
                verified[number] = version
        for number in replicas.healthy():
            assert verified[number] == current
        for number, path in paths.items():
            if replicas[number].state is not path[-1]:
                path.append(replicas[number].state)
    for path in paths.values():
        for place, state in enumerate(path[:-1]):
            if state is S.DEAD:
                assert path[place + 1] is S.RESTARTING
            if state is S.RESTARTING:
                assert path[place + 1] in (S.STALE, S.DEAD)
