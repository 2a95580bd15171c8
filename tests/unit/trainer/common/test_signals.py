"""Real signals to a real process: the first asks, the second ends, ignored ones stay ignored."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import signal, sys, threading
from verl.trainer.common.signals import stop_on_signals
say = lambda text: print(text, flush=True)
for number in (signal.SIGTERM, signal.SIGHUP):  # as in a user's foreground, whatever started the tests ignores
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
asked = threading.Event()
with stop_on_signals(asked.set, lambda: say("at once")) as by:
    say("ready")
    while not asked.wait(0.05): pass
    say(by.by)
    sys.stdin.readline()
say("finished")
"""


def start(*arguments: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_asks_and_the_second_ends_it_at_once(number):
    process = start()
    process.send_signal(number)
    assert process.stdout.readline() == f"{number.name}\n"
    time.sleep(0.6)  # sooner it would count as the same one, delivered twice
    process.send_signal(number)
    left, _ = process.communicate()
    assert left.splitlines()[0] == "at once"
    assert "finished" not in left
    assert process.returncode in (-number, 1 if number is signal.SIGINT else -number)


def test_what_is_ignored_stays_ignored_and_one_signal_lets_the_work_finish():
    process = start("nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    process.send_signal(signal.SIGHUP)
    assert process.communicate("go on\n")[0] == "finished\n"
    assert process.returncode == 0
