"""When a run that died is started again: each rule by example, and what holds over any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.trainer.recovery.supervisor import AttemptFailure, GiveUp, Restart, RestartHistory, decide_restart

KILLED = AttemptFailure("the driver was killed by SIGKILL", restartable=True)
HERE = AttemptFailure("a rank died", restartable=True, location="update_actor of step 3, role actor")
THERE = AttemptFailure("a rank died", restartable=True, location="gen of step 3, role actor")
WRONG = AttemptFailure("a key is wrong", restartable=False)


@pytest.mark.parametrize(
    ("failures", "last"),
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
def test_what_comes_after_a_history_of_endings_with_what_was_saved(failures, last):
    history = RestartHistory()
    for ending, saved in failures:
        history, decision = decide_restart(history, ending, saved, max_restarts=3)
    assert decision == last


def test_giving_up_says_why():
    history = RestartHistory()
    for _ in range(3):
        history, _ = decide_restart(history, KILLED, None, 3)
    assert decide_restart(history, KILLED, None, 3)[1] == GiveUp(
        "trainer.max_restarts = 3, and no step was saved since the first restart"
    )
    history, _ = decide_restart(RestartHistory(), HERE, None, 3)
    history, _ = decide_restart(history, KILLED, None, 3)
    _, decision = decide_restart(history, HERE, None, 3)
    assert decision == GiveUp("it failed twice at the same location (update_actor of step 3, role actor)")


endings = st.builds(AttemptFailure, st.just("why"), st.booleans(), st.sampled_from([None, "a", "b", "c"]))


@given(st.lists(st.tuples(endings, st.booleans()), max_size=40), st.integers(0, 5))
def test_between_two_checkpoints_no_more_restarts_than_allowed_and_no_place_twice(failures, limit):
    history, saved, since, places, delay = RestartHistory(), 0, 0, set(), 0.0
    for ending, progressed in failures:
        if progressed:
            saved, since, places, delay = saved + 1, 0, set(), 0.0
        history, decision = decide_restart(history, ending, str(saved) if saved else None, limit)
        if isinstance(decision, GiveUp):
            assert not ending.restartable or since == limit or ending.location in places
            return
        assert ending.restartable
        assert ending.location not in places
        since += 1
        places |= {ending.location} - {None}
        assert decision.number == since <= limit
        assert delay < decision.delay <= 60.0
        delay = decision.delay
