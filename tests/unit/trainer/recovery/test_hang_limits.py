"""How long a phase may stand still, and which rank the others keep waiting for."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from verl.trainer.recovery.hang_detector import RESTART_PHASE, HangLimits, SlowRanks

SEEN = st.lists(st.tuples(st.sampled_from(["gen", "ref"]), st.floats(0, 1e5)))


def test_a_phase_that_is_not_known_gets_half_an_hour_then_five_times_what_it_took():
    limits = HangLimits(None)
    assert limits.limit("gen") == limits.limit("") == 1800
    limits.record_phase("gen", 200)
    assert limits.limit("gen") == 1000
    assert limits.limit("update_actor") == 1800, "of it nothing is known yet"
    limits.record_phase("update_actor", 1.5)
    assert limits.limit("update_actor") == 300, "compiling for another shape is no hang"
    assert limits.limit("") == 1000, "between phases: as long as the longest"


def test_an_old_slow_time_is_forgotten():
    limits = HangLimits(None)
    limits.record_phase("gen", 3600)  # compiled
    for _ in range(10):
        limits.record_phase("gen", 100)
    assert limits.limit("gen") == 500


def test_who_cannot_run_at_all_is_waited_for_a_minute():
    limits = HangLimits(None)
    limits.record_phase("gen", 200)
    assert limits.limit("gen", "stopped") == limits.limit("other", "dead") == 60
    assert limits.limit("gen", "traced") == math.inf, "somebody is looking at it"


@given(
    st.floats(0.1, 1e5),
    st.lists(st.tuples(st.sampled_from(["gen", "ref"]), st.floats(0, 1e5))),
    st.sampled_from(["user", "stopped"]),
)
def test_a_limit_that_is_set_holds_whatever_was_seen(timeout, seen, kind):
    limits = HangLimits(timeout)
    for phase, seconds in seen:
        limits.record_phase(phase, seconds)
    assert limits.limit("gen", kind) == timeout
    assert limits.limit("", kind) == (timeout if seen or kind == "stopped" else max(timeout, 300)), "models are loaded"
    assert limits.limit("gen", "starting") == max(timeout, 300), "a group may be started anew in a phase"
    restart = limits.limit(f"{RESTART_PHASE}rollout", kind)
    assert restart == (timeout if kind == "stopped" else max(timeout, 300)), "and before it can be asked, too"


def test_a_rank_is_slow_if_others_wait_for_it_in_three_steps_in_a_row():
    slow = SlowRanks()
    said = []
    for first in (30.0, 30.0, 0.0, 30.0, 30.0, 30.0, 30.0):
        slow.record_wait("rank 1", first / 2)
        slow.record_wait("rank 1", first / 2)
        slow.record_wait("rank 0", 5.0)
        said.append(slow.step_done(100.0))
    assert [found for _, found in said] == [None, None, None, None, None, ("rank 1", 30.0), None]
    assert [waited for waited, _ in said] == [30.0, 30.0, 5.0, 30.0, 30.0, 30.0, 30.0]
    assert SlowRanks().step_done(1.0) == (0.0, None)
