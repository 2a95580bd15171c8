"""The watch of a controller that hangs in its own code; ranks that hang are in tests/distributed/test_hangs.py."""

from __future__ import annotations

import io
import os
import signal
import threading
import time

import pytest

from verl.single_controller.base import HangError
from verl.trainer.common.run_status import RunStatus
from verl.trainer.recovery import hang_detector
from verl.trainer.recovery.hang_detector import HangDetector, SlowRanks, raise_in_main_thread
from verl.utils import progress
from verl.utils.progress import pulse, pulsing, tick

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="needs a signal of its own")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    for name in ("POLL_S", "QUIET_S", "RAISE_S"):
        monkeypatch.setattr(hang_detector, name, 0.05)


def waits_for_itself() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def test_a_function_that_waits_for_itself_is_named_and_raised_out_of():
    status = RunStatus(10, done_steps=2)
    watch = HangDetector(status, 0.5, raise_in_controller=raise_in_main_thread())
    with pytest.raises(HangError) as caught, watch, status.phase("reward"):
        waits_for_itself()
    line = waits_for_itself.__code__.co_firstlineno + 3
    named = f"the controller is in the user's function waits_for_itself ({__file__}:{line})"
    assert caught.value.summary.startswith("reward of step 3 has hung for ")
    assert caught.value.summary.endswith(named)
    assert (caught.value.phase, caught.value.step, caught.value.role) == ("reward", 3, "controller")
    assert status.snapshot().hang is caught.value


def test_the_slowest_rank_is_named_with_its_wait():
    ranks = SlowRanks()
    for _ in range(2):
        ranks.record_wait("actor rank 0", 3.0)
        ranks.record_wait("actor rank 1", 4.0)
        ranks.step_done(10.0)
    ranks.record_wait("actor rank 0", 3.0)
    ranks.record_wait("actor rank 1", 4.0)
    ranks.record_wait("actor rank 2", 9.0)  # longer, but only in this step
    assert ranks.step_done(10.0) == (9.0, ("actor rank 1", 4.0))


@pytest.mark.parametrize("move", [tick, pulse])
def test_whatever_moves_is_no_hang(move):
    status = RunStatus(10)
    with HangDetector(status, 2.0, raise_in_controller=raise_in_main_thread()), status.phase("save_checkpoint"):
        for _ in range(30):
            time.sleep(0.1)
            move()
    assert status.snapshot().problem is None


def test_who_waits_for_a_service_moves_for_so_long(monkeypatch):
    monkeypatch.setattr(progress, "PULSE_S", 0.1)
    status = RunStatus(10)
    with HangDetector(status, 1.0, raise_in_controller=raise_in_main_thread()), status.phase("step"):
        with pulsing(60.0):
            time.sleep(2.0)
        with pytest.raises(HangError), pulsing(0.5):
            time.sleep(20.0)


def test_what_goes_on_is_said_as_the_trouble_was(caplog):
    status, said = RunStatus(10), []
    with HangDetector(status, 1.0, raise_in_controller=raise_in_main_thread()):
        with status.phase("adv"):
            while not said:
                time.sleep(0.2)
                said = [found for found in [status.snapshot().problem] if found]
        while status.snapshot().problem:
            time.sleep(0.01)
    assert said[0].startswith(
        "adv of step 1 has waited for 1 s: the controller is in the user's function test_what_goes"
    )
    assert "the code between phases of step 1 continues" in caplog.text


def test_a_debugger_that_is_open_is_no_hang():
    import pdb

    class SlowToType(io.StringIO):
        def readline(self, *_: object) -> str:
            time.sleep(1.2)
            return "continue\n"

    status = RunStatus(10)
    with HangDetector(status, 0.3, raise_in_controller=raise_in_main_thread()), status.phase("gen"):
        pdb.Pdb(stdin=SlowToType(), stdout=io.StringIO(), nosigint=True).set_trace()
        went_on = True
    assert went_on
    assert status.snapshot().problem is None


def test_time_in_which_the_process_could_not_run_is_no_hang(monkeypatch):
    """As when a laptop sleeps, or a scheduler suspends a job."""
    monkeypatch.setattr(hang_detector, "SUSPENDED_S", 1.0)
    monkeypatch.setattr(hang_detector, "POLL_S", 0.3)
    pid = os.fork()
    if pid == 0:
        status = RunStatus(10)
        with HangDetector(status, 2.5), status.phase("gen"):
            time.sleep(0.5)
            time.sleep(0.5)
        os._exit(status.hang is not None)
    time.sleep(0.2)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_thread_ends_with_the_block_and_the_next_block_is_watched_again():
    status = RunStatus(10)
    watch = HangDetector(status, 60.0)
    for _ in range(2):
        with watch:
            assert [thread for thread in threading.enumerate() if thread.name == "hang-detector"]
        time.sleep(0.3)
        assert not [thread for thread in threading.enumerate() if thread.name == "hang-detector"]
