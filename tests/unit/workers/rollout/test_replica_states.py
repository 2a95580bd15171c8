"""The states of a rollout replica: the table, and laws over any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.workers.rollout.replica_states import Event, NoReplicaError, Replica, Replicas, State, after

S, E = State, Event
VERSION = 7
# (before, event) -> after, for weights of the current version; what is not here changes nothing.
TABLE = {
    (S.RESTARTING, E.STARTED): S.STALE,
    (S.STALE, E.VERIFIED): S.HEALTHY,
    (S.STALE, E.SILENT): S.SUSPECT,
    (S.HEALTHY, E.VERIFIED): S.HEALTHY,
    (S.HEALTHY, E.UPDATING): S.STALE,
    (S.HEALTHY, E.SILENT): S.SUSPECT,
    (S.SUSPECT, E.ANSWERED): S.HEALTHY,
    (S.DEAD, E.RESTART): S.RESTARTING,
    **{(state, E.DIED): S.DEAD for state in S},
}


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("event", E)
def test_every_event_in_every_state(state, event):
    before = Replica(state, VERSION if state in (S.HEALTHY, S.SUSPECT) else None, life=2)
    found = after(before, event, 2, VERSION, VERSION)
    assert found.state is TABLE.get((state, event), state)
    assert after(before, event, 1, VERSION, VERSION) == before, "an earlier life says nothing"


def test_only_verified_weights_of_the_current_version_admit():
    replicas = Replicas(3)
    replicas.advance(4)
    replicas.hear(E.STARTED)
    replicas.hear(E.VERIFIED, [0, 1], version=4)
    replicas.hear(E.VERIFIED, [2], version=3)
    assert replicas.serving() == [0, 1]
    with pytest.raises(NoReplicaError, match=r"2 is stale \(weights of version 3\).*verified weights of version 4"):
        replicas.require_all()
    replicas.hear(E.SILENT, [0])
    replicas.advance(5)
    assert replicas.serving() == []
    replicas.hear(E.VERIFIED, [1, 2], version=5)
    replicas.hear(E.ANSWERED, [0])
    assert replicas[0].state is S.STALE, "it answers again, with the weights of version 4"
    assert replicas.serving() == [1, 2]


def test_news_of_an_earlier_life_come_too_late():
    replicas = Replicas(1)
    replicas.hear(E.STARTED)
    replicas.hear(E.DIED)
    replicas.hear(E.RESTART)
    replicas.hear(E.STARTED)
    replicas.hear(E.VERIFIED, life=0, version=0)  # by the process that died
    assert replicas.serving() == []
    replicas.hear(E.VERIFIED, version=0)
    assert replicas.serving() == [0]
    replicas.hear(E.DIED, life=0)
    assert replicas.serving() == [0]


events = st.tuples(st.sampled_from(E), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3))


@given(st.lists(st.one_of(events, st.integers(0, 3)), max_size=60))
def test_whoever_serves_was_verified_for_the_current_version_in_this_life(sequence):
    """Against a plain account of what was heard: after its last start, update and new version, it was verified."""
    replicas, current = Replicas(2), 0
    verified: dict[int, int | None] = {0: None, 1: None}
    paths: dict[int, list[State]] = {0: [S.RESTARTING], 1: [S.RESTARTING]}
    for heard in sequence:
        if isinstance(heard, int):
            current = heard
            replicas.advance(current)
        else:
            event, number, life, version = heard[0], heard[1] % 2, heard[2], heard[3]
            before = replicas[number]
            replicas.hear(event, [number], life, version)
            if before.life == life and event in (E.DIED, E.RESTART, E.UPDATING):
                verified[number] = None
            elif before.life == life and event is E.VERIFIED and before.state in (S.STALE, S.HEALTHY):
                verified[number] = version
        for number in replicas.serving():
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
