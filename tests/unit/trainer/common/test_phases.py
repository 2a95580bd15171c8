"""A phase's memory is that of the groups that work in it; what encloses others has the highest of theirs."""

import pytest

from verl.trainer.common.run_status import Phases, RunStatus
from verl.trainer.common.run_summary import describe_bottleneck


def test_memory_is_asked_of_the_working_groups_and_nested_peaks_count():
    told = {("actor",): [(5.0, 1.0), (2.0, 1.5)], ("critic",): [(9.0, 3.0)]}
    phases = Phases(RunStatus(1, 0), lambda groups: told[groups].pop(0))
    with phases("step"):
        with phases("old_log_prob", "actor"):
            pass
        with phases("values", "critic", None):
            pass
        with phases("adv"):
            pass
        with phases("old_log_prob", "actor"):
            pass
    assert phases.memory_gb == {
        "old_log_prob": 5.0,
        "old_log_prob/after": 1.5,
        "values": 9.0,
        "values/after": 3.0,
        "step": 9.0,
    }


def test_without_a_device_no_memory_is_asked_for():
    phases = Phases(RunStatus(1, 0))
    with phases("gen"):
        pass
    assert phases.memory_gb == {}
    assert phases.seconds["gen"] >= 0


def test_an_error_carries_the_innermost_phase_and_the_step_it_came_from():
    console = RunStatus(10, done_steps=6)
    phases = Phases(console)
    with pytest.raises(KeyError) as caught, phases("step"), phases("update_actor"):
        raise KeyError("advantages")
    assert (caught.value.phase, caught.value.step) == ("update_actor", 7)


def test_the_verdict_names_the_phase_and_a_key_that_helps():
    text = describe_bottleneck({"gen": 6.0, "update_actor": 3.0, "step": 9.5, "reward": 1.0})
    assert text.startswith("gen took 60% of the time")
    assert "data.max_response_length" in text
