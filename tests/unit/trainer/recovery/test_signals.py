"""Real signals to a real process: the first asks, the second ends, ignored ones stay ignored."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import signal, sys, threading
from verl.trainer.recovery.signals import stop_on_signals
say = lambda text: print(text, flush=True)
for number in (signal.SIGTERM, signal.SIGHUP):  # as in a user's foreground, whatever started the tests ignores
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
asked = threading.Event()
with stop_on_signals(asked.set, lambda: say("at once")) as request:
    say("ready")
    while not asked.wait(0.05): pass
    say(request.signal)
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


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP))]
)
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


ENDS = """
import sys, time
from verl.trainer.recovery.exit_messages import exit_with_message
from verl.trainer.recovery.signals import exit_on_signals, stop_on_signals
from verl.trainer.recovery.supervised_process import before_first_step
killed = lambda: print("killed", flush=True)
def wait():
    print("ready", flush=True)
    time.sleep(60)
with exit_with_message():
    if sys.argv[1] == "before":
        wait()
    elif sys.argv[1] == "starting":
        with stop_on_signals(lambda: print("asked"), killed, is_starting=lambda: True):
            wait()
    elif sys.argv[1] == "replaced":
        with stop_on_signals(lambda: print("asked"), killed, is_starting=lambda: True):
            try:
                wait()
            except KeyboardInterrupt:  # as in a blocking call of Ray
                raise KeyboardInterrupt from None
    elif sys.argv[1] == "marked":
        with before_first_step():
            wait()
    elif sys.argv[1] == "done":
        exit_on_signals("the run is saved")
        wait()
"""


# Every moment and every signal once; all combinations are in the slow tier.
FAST = [
    ("before", signal.SIGINT),
    ("marked", signal.SIGTERM),
    ("starting", signal.SIGHUP),
    ("replaced", signal.SIGTERM),
    ("done", signal.SIGTERM),
]


@pytest.mark.parametrize(
    ("when", "number"),
    [
        pytest.param(when, number, marks=() if (when, number) in FAST else pytest.mark.slow)
        for when in ("before", "marked", "starting", "replaced", "done")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    ],
)
def test_a_signal_outside_of_training_ends_the_program_with_one_sentence(when, number):
    prelude = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n"
    prelude += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", prelude + ENDS, when], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    left, errors = process.communicate()
    plain_ctrl_c = when in ("before", "marked") and number is signal.SIGINT
    known = "" if when == "before" else " before the first step"
    sentence = "stopped." if plain_ctrl_c else f"stopped by {number.name}{known}."
    assert errors.splitlines() == [f"{number.name}: the run is saved" if when == "done" else sentence]
    assert process.returncode == (0 if when == "done" else 128 + number)
    assert left.splitlines() == (["killed"] if when in ("starting", "replaced") else [])
