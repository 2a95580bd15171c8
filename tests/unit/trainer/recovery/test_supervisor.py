"""The supervisor with real processes, signals and a real terminal; the run is a few lines, without Ray or torch."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl.utils.checkpoint.checkpoint_manager import CheckpointManager

PROGRAM = """
import os, pathlib, signal, subprocess, sys, time
from types import SimpleNamespace
from verl.trainer.recovery.exit_messages import exit_with_message, attach_resume_hint
from verl.trainer.recovery.signals import stop_on_signals
from verl.trainer.recovery import supervised_process, supervisor
from verl.trainer.recovery.supervised_process import report_to_supervisor
from verl.trainer.recovery.supervisor import supervise
from verl.utils.logging_setup import setup_logging

# As in a user's foreground: what started the tests may ignore some (nohup, a job in the background).
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

class WorkerDiedError(RuntimeError):
    phase, step, role, rank, host = "gen", 3, "actor", 0, "here"
    summary = property(str)

supervisor._FIRST_DELAY_S = float(os.environ.get("DELAY", 0.3))
supervised_process._SIGSTOP_LIMIT_S = 0.3
supervised_process._HEARTBEAT_LIMIT_S, supervised_process._EXIT_LIMIT_S = 1.5, 5.0
supervised_process._SUSPENDED_S = 1.0
supervised_process._STARTUP_EXIT_LIMIT_S = 1.0
folder = pathlib.Path(sys.argv[1])
trainer = SimpleNamespace(
    max_restarts=2, default_local_dir=str(folder), resume_mode="auto", resume_from_path=None,
    record=SimpleNamespace(redact=[], texts=True),
)
setup_logging()

def attempt():
    attempts = folder / "attempts"
    number = len(attempts.read_text().split()) + 1 if attempts.exists() else 1
    with attempts.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return number

with exit_with_message(), attach_resume_hint(trainer):
    supervise(SimpleNamespace(trainer=trainer))
    assert not {"ray", "torch"} & set(sys.modules)
    number = attempt()
    BODY
"""


def program(body: str) -> str:
    return PROGRAM.replace("BODY", body.replace("\n", "\n    "))


def run(body: str, folder: Path, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program(body), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.fixture
def start(tmp_path) -> Iterator:
    """Starts a program that writes `running` when its child runs; ends it at the latest with the test."""
    started: list[subprocess.Popen] = []

    def start(body: str, **options: object) -> tuple[subprocess.Popen, int]:
        command = [sys.executable, "-c", program(body), str(tmp_path)]
        options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True} | options
        started.append(subprocess.Popen(command, **options))
        wait_for(lambda: (tmp_path / "running").exists())
        return started[-1], pids(tmp_path)[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


def wait_for(happened, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "attempts").read_text().split()]


RUNNING = "(folder / 'running').touch()\n"
STOPS_WHEN_ASKED = """
asked = []
with stop_on_signals(lambda: asked.append(1), lambda: asked.append("at once")):
    (folder / 'running').touch()
    while not asked: time.sleep(0.01)
    time.sleep(0.8)
"""


def test_a_driver_that_is_killed_is_started_again_and_nothing_it_started_is_left(tmp_path):
    body = """
if number == 1:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    (folder / "left").write_text(str(left.pid))
    report_to_supervisor(step=2)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(body, tmp_path)
    assert done.returncode == 0, done.stderr
    first, _ = pids(tmp_path)
    said = f"restart 1 of 2 in 0 s: the driver (pid {first}) was killed by SIGKILL; starts from the beginning, "
    assert f"{said}steps 1-2 are repeated" in done.stderr
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))


def test_an_error_that_may_be_an_accident_is_said_in_one_line_with_the_step_it_goes_on_at(tmp_path):
    manager = CheckpointManager(tmp_path)
    (manager.begin(2) / "weights").write_bytes(b"1")
    manager.commit(2)
    body = "if number == 1: raise WorkerDiedError('worker process died. What helps: less.')"
    done = run(body, tmp_path)
    assert done.returncode == 0, done.stderr
    traceback, restart = done.stderr.splitlines()
    assert "Full traceback in " in traceback
    assert "restart 1 of 2 in 0 s: worker process died (gen of step 3, role actor); " in restart
    assert restart.endswith(f"resumes at step 2 ({tmp_path}/global_step_2), step 3 is repeated")


def test_the_same_place_twice_is_no_accident_and_its_cause_is_last(tmp_path):
    done = run("raise WorkerDiedError('worker process died.')", tmp_path)
    assert done.returncode == 1
    assert len(pids(tmp_path)) == 2
    *_, why, file, cause, last = done.stderr.splitlines()
    assert why.endswith("not restarted: it failed twice at the same location (gen of step 3, role actor)")
    assert file.startswith("Full traceback in ")
    assert cause.endswith("worker process died.")
    assert last.startswith("Role actor, rank 0, host here, phase gen of step 3. The same command starts from the begin")


def test_without_restarts_left_the_cause_is_last(tmp_path):
    done = run("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert done.returncode == 1
    *_, last_pid = attempts = pids(tmp_path)
    assert len(attempts) == 3
    *_, why, last = done.stderr.splitlines()
    assert "trainer.max_restarts = 2" in why
    assert last.startswith(f"The driver (pid {last_pid}) was killed by SIGKILL. The same command starts from the begin")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("from verl.config import ConfigError; raise ConfigError([])", 2),
        ("raise LookupError('no such role')", 1),
        pytest.param("raise KeyboardInterrupt", 130, marks=pytest.mark.slow),
        pytest.param("sys.exit(7)", 7, marks=pytest.mark.slow),
        pytest.param("pass", 0, marks=pytest.mark.slow),
        pytest.param("import atexit; atexit.register(os.abort)", 0, marks=pytest.mark.slow),  # the run was over
    ],
)
def test_what_would_happen_again_ends_as_it_does_alone(tmp_path, body, code):
    done = run(body, tmp_path)
    assert done.returncode == code, done.stderr
    assert len(pids(tmp_path)) == 1
    assert "restart" not in done.stderr


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP)", "was stopped (SIGSTOP) and not continued", marks=pytest.mark.slow
        ),
        ("report_to_supervisor(heartbeat=True); time.sleep(60)", "sent no heartbeat for 2 s;"),
    ],
)
def test_a_driver_that_is_stopped_or_silent_is_killed_and_started_again(tmp_path, body, cause):
    done = run(f"if number == 1: {body}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert cause in done.stderr
    assert not psutil.pid_exists(pids(tmp_path)[0])


@pytest.mark.slow
def test_time_in_which_nobody_could_run_is_no_silence(start):
    """As when a laptop sleeps or a scheduler suspends a job: here the child keeps quiet while its supervisor stands."""
    process, _ = start(
        f"report_to_supervisor(heartbeat=True)\n{RUNNING}time.sleep(3.0)\nreport_to_supervisor(heartbeat=True)"
    )
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 0
    assert "restart" not in process.stderr.read()


@pytest.mark.slow
def test_a_run_that_has_ended_well_and_does_not_exit_is_ended(tmp_path):
    done = run("import atexit, threading; threading.Thread(target=lambda: time.sleep(60)).start()", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(pids(tmp_path)) == 1


@pytest.mark.slow
def test_what_a_script_does_after_its_run_takes_as_long_as_it_takes(tmp_path):
    script = (
        program("report_to_supervisor(heartbeat=True)")
        .replace("exit_with_message(), ", "")
        .replace("1.5, 5.0", "1.0, 1.0")
    )
    after = "time.sleep(3)\n(folder / 'after').touch()\n"
    done = subprocess.run([sys.executable, "-c", script + after, str(tmp_path)])
    assert done.returncode == 0
    assert (tmp_path / "after").exists()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)),
    ],
)
def test_a_signal_reaches_the_run_once_however_often_it_is_delivered(start, number):
    """To the process and to its group, as `timeout` does, and to every process, as schedulers do."""
    process, child = start(STOPS_WHEN_ASKED)
    process.send_signal(number)
    os.killpg(process.pid, number)
    os.kill(child, number)
    assert process.wait() == 0, process.stderr.read()
    assert process.stderr.read().count("stopping: ") == 1


def test_the_second_signal_ends_all_at_once_also_what_hears_no_signal(start):
    process, child = start(f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{RUNNING}time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    assert not psutil.pid_exists(child)


@pytest.mark.slow
def test_a_warning_signal_and_the_one_it_warns_of_are_no_two_requests(start):
    process, _ = start(STOPS_WHEN_ASKED)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0, process.stderr.read()


def test_who_dies_after_being_asked_to_stop_is_not_started_again(start, tmp_path):
    process, child = start(f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{RUNNING}time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    os.kill(child, signal.SIGKILL)
    assert process.wait() == -signal.SIGTERM
    assert len(pids(tmp_path)) == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 1), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_in_the_pause_before_a_restart_ends_it_with_where_the_command_goes_on(start, number, code, tmp_path):
    process, child = start(f"{RUNNING}time.sleep(60)", env=os.environ | {"DELAY": "60"})
    os.kill(child, signal.SIGKILL)
    assert "restart 1 of 2 in 60 s" in process.stderr.readline()
    process.send_signal(number)
    assert process.wait() == code
    assert "he same command starts from the beginning" in process.stderr.read().splitlines()[-1]
    assert len(pids(tmp_path)) == 1


# As blocking calls of Ray: the signal is delivered, but Python runs no handler before the call returns.
BLOCKS = f"""
import ctypes
from verl.trainer.recovery.supervised_process import before_first_step
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
(folder / "daemon").write_text(str(daemon.pid))
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
with before_first_step():
    {RUNNING.strip()}
    lock(mutex), lock(mutex)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_driver_that_blocks_before_the_first_step_is_killed_after_a_stop_signal(start, number, code, tmp_path):
    process, child = start(BLOCKS)
    process.send_signal(number)
    assert process.wait() == code
    stopped = f"stopped by {number.name} before the first step."
    assert process.stderr.read() == f"{stopped} The same command starts from the beginning: no step was saved.\n"
    assert not any(psutil.pid_exists(pid) for pid in (child, int((tmp_path / "daemon").read_text())))
    assert len(pids(tmp_path)) == 1


@pytest.mark.slow
def test_a_step_may_take_longer_to_finish_than_a_start(start):
    """Also if no heartbeat is sent, as by a run in one process."""
    process, _ = start(
        f"""
with supervised_process.before_first_step():
    pass
{STOPS_WHEN_ASKED.replace("sleep(0.8)", "sleep(2.5)")}"""
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0, process.stderr.read()


@pytest.mark.slow
def test_a_long_start_without_heartbeats_is_not_silence(tmp_path):
    done = run("with supervised_process.before_first_step(): time.sleep(3)", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(pids(tmp_path)) == 1


def test_a_run_dies_with_its_supervisor(start):
    process, child = start(f"{RUNNING}time.sleep(60)")
    process.kill()
    wait_for(lambda: not psutil.pid_exists(child))


def on_a_terminal(body: str, folder: Path) -> tuple[int, int]:
    """The program as the leader of a session on a terminal of its own: its pid and our end of the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program(body), str(folder)])
    return pid, terminal


def said_on(terminal: int, seconds: float = 120) -> str:
    """Until the last process closes it, or for so long."""
    text, deadline = b"", time.monotonic() + seconds
    while select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0]:
        try:
            text += os.read(terminal, 4096)
        except OSError:
            break
    return text.decode()


@pytest.mark.slow
def test_a_run_on_a_terminal_writes_reads_and_hears_ctrl_c(tmp_path):
    """Its process group is not the terminal's: it writes there even under `stty tostop`, and a debugger can ask."""
    body = f"""
subprocess.run(["stty", "tostop"], preexec_fn=lambda: signal.signal(signal.SIGTTOU, signal.SIG_IGN), check=True)
print("reads", input(), flush=True)
{STOPS_WHEN_ASKED}print("stopped", flush=True)
"""
    pid, terminal = on_a_terminal(body, tmp_path)
    try:
        os.write(terminal, b"something\n")
        wait_for(lambda: (tmp_path / "running").exists())
        os.write(terminal, b"\x03")
        said = said_on(terminal)
    finally:
        os.close(terminal)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, seconds=10)
        os.kill(pid, signal.SIGKILL)  # if it has not ended by itself
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, said
    assert "reads something" in said
    assert "SIGINT: stopping" in said
    assert "stopped\r\n" in said
