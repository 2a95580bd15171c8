"""Start-up phases: the running one can be read, and each logs its duration if that is enabled."""

import logging

import pytest

from verl.utils import console
from verl.utils.console import current_startup_phase, log_startup_phases, show_startup, startup_phase


@pytest.fixture(autouse=True)
def said(caplog, monkeypatch):
    monkeypatch.setattr(console, "SHORTEST_S", 0.0)
    monkeypatch.setattr(console, "POLL_S", 0.001)
    monkeypatch.setattr(console, "LOG_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO, logger="verl")
    yield caplog
    log_startup_phases(False)


def test_phases_nest_and_log_their_duration(said):
    log_startup_phases(True)
    with startup_phase("workers"):
        with startup_phase("weights"):
            assert current_startup_phase()[0] == "weights"
        assert current_startup_phase()[0] == "workers"
    assert current_startup_phase() == ("", 0.0)
    assert said.messages == ["start-up: weights 0.00 s", "start-up: workers 0.00 s"]


def test_a_phase_that_fails_and_phases_without_the_setting_log_nothing(said):
    with startup_phase("data"):
        pass
    log_startup_phases(True)
    with pytest.raises(ValueError, match="no data"), startup_phase("data"):
        raise ValueError("no data")
    assert current_startup_phase() == ("", 0.0)
    assert said.messages == []


def test_a_running_phase_is_shown(said):
    with show_startup(), startup_phase("Ray"):
        while not said.messages:
            pass
    assert said.messages[0] == "start-up: Ray, 0 s so far"
    said.clear()
    with show_startup(enabled=False), startup_phase("Ray"):
        pass
    assert said.messages == []
