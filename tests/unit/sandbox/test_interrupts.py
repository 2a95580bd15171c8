"""Interrupts of a cell, in this process: the handler of the next cell, and the traceback."""

from __future__ import annotations

import io
import os
import signal
import socket

import pytest

from verl.sandbox.program import ERROR, FINISHED, _run_cell


@pytest.fixture
def run():
    """Run a cell with Python's handler of SIGINT; return its report and the handler for the next cell."""
    before = signal.getsignal(signal.SIGINT)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield lambda source: _run_cell(ours, source, "<cell>", {}, signal.default_int_handler)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["SIG_DFL", "SIG_IGN", "default_int_handler"])
def test_the_next_cell_has_the_handler_that_the_cell_has_set(run, name):
    handler = getattr(signal, name)
    assert run(f"import signal; signal.signal(signal.SIGINT, signal.{name})") == (FINISHED, handler)


def test_an_interrupt_does_not_cut_the_traceback(run, monkeypatch):
    class InterruptedStream(io.StringIO):
        def write(self, text):
            os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    stderr = InterruptedStream()
    monkeypatch.setattr("sys.stderr", stderr)
    assert run("raise ValueError('the whole text')")[0] == ERROR
    assert stderr.getvalue().endswith("ValueError: the whole text\n")
    assert "KeyboardInterrupt" not in stderr.getvalue()


@pytest.mark.parametrize("error", ["OSError", "SystemExit", "ValueError"])
def test_an_error_that_cannot_be_formatted_is_named(run, capsys, error):
    source = f"""
class Broken(Exception):
    @property
    def __notes__(self):
        raise {error}
raise Broken
"""
    assert run(source)[0] == ERROR
    assert "Broken" in capsys.readouterr().err


def test_an_interrupt_ends_the_formatting_of_an_error(run, capsys):
    source = """
import os, signal, time
class Slow(Exception):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
raise Slow
"""
    assert run(source)[0] == ERROR
    assert "Slow" in capsys.readouterr().err
