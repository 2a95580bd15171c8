"""When a run that died is started again: each rule by example, and what holds over any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.trainer.supervision.policy import Ending, GiveUp, Record, Restart, decide

KILLED = Ending("the driver was killed by SIGKILL", restartable=True)
HERE = Ending("a rank died", restartable=True, place="update_actor of step 3, role actor")
THERE = Ending("a rank died", restartable=True, place="gen of step 3, role actor")
WRONG = Ending("a key is wrong", restartable=False)


@pytest.mark.parametrize(
    ("history", "last"),
    [
        ([(WRONG, None)], GiveUp()),
        ([(KILLED, None)], Restart(1, 2.0)),
        ([(KILLED, None)] * 2, Restart(2, 4.0)),
        ([(KILLED, None)] * 3, Restart(3, 8.0)),
        ([(HERE, None), (THERE, None)], Restart(2, 4.0)),
        ([(KILLED, None), (KILLED, "step 1"), (KILLED, "step 1")], Restart(2, 4.0)),
        ([(KILLED, "step 1"), (KILLED, "step 1"), (KILLED, "step 2")], Restart(1, 2.0)),
        ([(HERE, "step 1"), (HERE, "step 2")], Restart(1, 2.0)),
    ],
)
def test_what_comes_after_a_history_of_endings_with_what_was_saved(history, last):
    record = Record()
    for ending, saved in history:
        record, decision = decide(record, ending, saved, max_restarts=3)
    assert decision == last


def test_giving_up_says_why():
    record = Record()
    for _ in range(3):
        record, _ = decide(record, KILLED, None, 3)
    assert decide(record, KILLED, None, 3)[1] == GiveUp(
        "trainer.max_restarts = 3, and no step was saved since the first of them"
    )
    record, _ = decide(Record(), HERE, None, 3)
    record, _ = decide(record, KILLED, None, 3)
    _, decision = decide(record, HERE, None, 3)
    assert decision == GiveUp("it died twice at the same place (update_actor of step 3, role actor)")


endings = st.builds(Ending, st.just("why"), st.booleans(), st.sampled_from([None, "a", "b", "c"]))


@given(st.lists(st.tuples(endings, st.booleans()), max_size=40), st.integers(0, 5))
def test_between_two_checkpoints_no_more_restarts_than_allowed_and_no_place_twice(history, limit):
    record, saved, since, places, delay = Record(), 0, 0, set(), 0.0
    for ending, progressed in history:
        if progressed:
            saved, since, places, delay = saved + 1, 0, set(), 0.0
        record, decision = decide(record, ending, str(saved) if saved else None, limit)
        if isinstance(decision, GiveUp):
            assert not ending.restartable or since == limit or ending.place in places
            return
        assert ending.restartable
        assert ending.place not in places
        since += 1
        places |= {ending.place} - {None}
        assert decision.number == since <= limit
        assert delay < decision.delay <= 60.0
        delay = decision.delay
