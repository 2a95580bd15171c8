"""A session remembers from cell to cell, and survives what its cells do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl.sandbox import Limits, Sandbox, Session


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(require="none", limits=Limits(wall_s=20.0, memory_mb=256, processes=32)) as made:
        yield made


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as made:
        yield made


def test_names_stay_and_the_last_value_is_shown(session: Session) -> None:
    assert session.execute("import math\nx = 3\nx + 1").stdout == "4\n"
    assert session.execute("def f(y):\n    return x * y\nprint('words'); f(5)").stdout == "words\n15\n"
    assert session.execute("None").stdout == ""
    assert session.execute("_").stdout == "15\n"


def test_an_exception_ends_the_cell_only(session: Session) -> None:
    result = session.execute("x = 1\nx / 0")
    assert (result.status, result.return_code) == ("error", 1)
    assert 'File "<cell 1>", line 2' in result.stderr
    assert "x / 0" in result.stderr
    assert session.execute("def f(:").stderr.endswith("SyntaxError: invalid syntax\n")
    assert session.execute("raise SystemExit(2)").status == "error"
    assert session.execute("x").stdout == "1\n"


def test_a_cell_that_takes_too_long_is_interrupted(session: Session) -> None:
    session.execute("x = 1")
    result = session.execute("import time\nprint('before')\ntime.sleep(60)", wall_s=0.3)
    assert (result.status, result.stdout) == ("timeout", "before\n")
    assert session.execute("x").stdout == "1\n"


def test_an_interrupt_from_outside(session: Session) -> None:
    threading.Timer(0.3, session.interrupt).start()
    result = session.execute("import time\ntime.sleep(60)")
    assert result.status == "error", "nor is it a timeout"
    assert result.stderr.endswith("KeyboardInterrupt\n")
    assert session.execute("1").stdout == "1\n"


def test_interrupts_at_the_start_of_a_cell_stop_only_this_cell(sandbox: Sandbox) -> None:
    source = f"import time\ntime.sleep(60)\n{'#' * 2**20}"
    with sandbox.session() as session, ThreadPoolExecutor(1) as pool:
        for _ in range(5):  # the first interrupts arrive while the program starts
            cell = pool.submit(session.execute, source)
            while not cell.done():
                session.interrupt()
                time.sleep(0.001)
            assert cell.result().stderr.endswith("KeyboardInterrupt\n")
        assert session.execute("1").stdout == "1\n"


def test_an_interrupt_that_comes_too_late_is_forgotten(session: Session) -> None:
    session.execute("x = 1")
    session.interrupt()
    time.sleep(0.2)
    assert session.execute("x").stdout == "1\n"


def test_a_timer_that_expires_between_cells_does_not_end_the_session(session: Session) -> None:
    source = """
import signal
def expire(*_):
    raise RuntimeError
signal.signal(signal.SIGALRM, expire)
signal.setitimer(signal.ITIMER_REAL, 0.2)
x = 1
"""
    assert session.execute(source).status == "finished"
    time.sleep(0.6)
    assert session.execute("x").stdout == "1\n"


def test_a_cell_may_replace_functions_of_the_standard_library(session: Session) -> None:
    assert session.execute("import signal, select\nsignal.signal = select.select = None").status == "finished"
    assert session.execute("1").stdout == "1\n"


def test_closing_wakes_the_thread_that_waits_for_a_cell(sandbox: Sandbox) -> None:
    session = sandbox.session()
    threading.Timer(0.3, session.close).start()
    assert session.execute("import time\ntime.sleep(60)").status == "error", "nor is it a timeout"
    assert not session.alive


def test_one_that_does_not_stop_takes_the_session_with_it(session: Session) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    result = session.execute(stubborn, wall_s=0.3)
    assert result.status == "timeout"
    assert "timeout, and it did not stop; the session is lost" in result.stderr
    assert (session.alive, session.execute("1").status) == (False, "refused")


def test_memory_in_a_cell(session: Session) -> None:
    session.execute("x = 1")
    assert session.execute("y = bytearray(1 << 30)").status == "memory"
    assert session.execute("x").stdout == "1\n"


def test_a_process_that_ends_itself_ends_the_session(session: Session) -> None:
    result = session.execute("import os; print('last', flush=True); os._exit(3)")
    assert (result.status, result.stdout, session.alive) == ("error", "last\n", False)


def test_output_of_a_cell_is_cut_and_the_next_one_is_whole(sandbox: Sandbox) -> None:
    with sandbox.session(Limits(output_bytes=100)) as session:
        assert session.execute("print('x' * 100000)").status == "output"
        assert session.execute("'whole'").stdout == "'whole'\n"


def test_what_a_cell_left_running_is_watched_between_cells(session: Session) -> None:
    eats = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        time.sleep(0.2); x = b"x" * (100 << 20); time.sleep(60)
"""
    assert session.execute(eats).status == "finished"
    time.sleep(3)
    result = session.execute("1")
    assert (result.status, session.alive) == ("memory", False)
