"""The kernel kills processes of a run: for the run's own limit (status memory), or for the memory of others."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.sandbox import Limits, Sandbox, available, cgroup, streams
from verl.sandbox.program import FINISHED, Confinement
from verl.sandbox.streams import Pipes, ProgramOutput
from verl.sandbox.supervisor import SandboxSupervisor
from verl.sandbox.types import Language
from verl.sandbox.usage import RunProcesses

ROOT = Path(__file__).parents[3]
LIMITS = Limits(wall_s=30.0, memory_mb=192, file_mb=16, processes=32)
KILLED_V1 = {"memory.oom_control": "oom_kill 1\n", "memory.max_usage_in_bytes": str(72 << 20)}

# The kernel kills the child, which has more memory; the parent ends as if nothing had happened.
KILLED_CHILD = """
import ctypes, os
if os.fork() == 0:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.memset(libc.mmap(None, 1 << 30, 3, 0x21, -1, 0), 1, 1 << 30)
    os._exit(0)
os.wait()
"""


@pytest.fixture(scope="module")
def with_cgroup() -> Iterator[Sandbox]:
    if not available().cgroup:
        pytest.skip("this process may not create a cgroup")
    with Sandbox(require="none", limits=LIMITS) as sandbox:
        yield sandbox


def test_a_run_reports_memory_if_the_kernel_killed_one_of_its_processes(with_cgroup: Sandbox) -> None:
    result = with_cgroup.run(KILLED_CHILD)
    assert (result.status, result.return_code) == ("memory", -signal.SIGKILL)
    assert "more than 192 MB of memory" in result.stderr


def test_a_cell_reports_memory_if_the_kernel_killed_one_of_its_processes(with_cgroup: Sandbox) -> None:
    with with_cgroup.session() as session:
        result = session.execute(KILLED_CHILD)
        assert (result.status, session.alive) == ("memory", False)
        assert "more than 192 MB of memory; the session is lost" in result.stderr


def test_a_cell_reports_memory_if_its_own_process_was_killed(with_cgroup: Sandbox) -> None:
    with with_cgroup.session() as session:
        result = session.execute(KILLED_CHILD.replace("os.fork()", "0"))
    assert (result.status, session.alive) == ("memory", False)


def test_a_compile_step_reports_memory_if_the_kernel_killed_one_of_its_processes(
    with_cgroup: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Language("main.py", compile=(sys.executable, "main.py"), start=("true",))
    monkeypatch.setattr("verl.sandbox.sandbox.find_language", lambda name: compiled)
    result = with_cgroup.run(KILLED_CHILD)
    assert result.compile is not None
    assert (result.status, result.compile.status, result.compile.return_code) == ("memory", "memory", -signal.SIGKILL)


HOST_KILL = """
import os, sys
from pathlib import Path
from verl.sandbox import Limits, Sandbox, cgroup
names, parents = cgroup._find_parents()
outer = Path(parents[0]) / f"verl-test-{os.getpid()}"
outer.mkdir()
try:
    for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        if (outer / name).exists(): (outer / name).write_text(str(300 << 20))
    (outer / "cgroup.procs").write_text(str(os.getpid()))
    with Sandbox(require="none", warm=1, limits=Limits(memory_mb=1024)) as sandbox:
        result = sandbox.run(sys.stdin.read())
        print(sandbox.isolation.cgroup, result.status, result.return_code)
finally:
    (Path(parents[0]) / "cgroup.procs").write_text(str(os.getpid()))
    outer.rmdir()
"""


def test_a_program_that_is_killed_for_the_memory_of_others_has_not_exceeded_its_own() -> None:
    """A cgroup above the run's runs out of memory, as a whole machine does: the run's own limit was not reached."""
    if available().cgroup != 1 or os.geteuid() != 0:
        pytest.skip("needs cgroup v1 and root")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOST_KILL]
    program = KILLED_CHILD.replace("os.fork()", "0")
    done = subprocess.run(command, input=program, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "1 error -9\n", done.stderr


@contextlib.contextmanager
def cgroup_of_files(folder: Path, version: int, counters: dict[str, str]) -> Iterator[cgroup.RunCgroup]:
    """A cgroup of ordinary files, with a limit of 72 MB."""
    files = cgroup.V1 if version == 1 else cgroup.V2
    for name in (files.procs, files.memory_max, files.pids_max):
        (folder / name).touch()
    (folder / files.memory_current).write_text("0\n")
    for name, text in counters.items():
        (folder / name).write_text(text)
    descriptor = os.open(folder, os.O_RDONLY)
    run = cgroup.RunCgroup(files, [descriptor])
    try:
        run.limit(64 << 20, 8)  # and 8 MB for the kernel
        yield run
    finally:
        run.close()
        os.close(descriptor)


@pytest.mark.parametrize("sender", ["init", "cell", "caller"])
def test_no_message_is_read_after_the_kernel_killed_a_process(sender: str, tmp_path: Path) -> None:
    """The message arrives before the next check of the limits: the end of a run or of a compiler (from the init), the
    report of a cell, or the next cell (from the caller), which must be answered."""
    pairs = {name: socket.socketpair() for name in ("init", "cell", "caller")}
    with contextlib.ExitStack() as stack:
        for ends in pairs.values():
            for end in ends:
                stack.enter_context(end)
        run = stack.enter_context(cgroup_of_files(tmp_path, 1, KILLED_V1))
        pipes = stack.enter_context(Pipes(b"", ProgramOutput(100)))
        confinement = Confinement(namespaces=True, landlock=0, seccomp=False, own_user=True, paths=())
        supervisor = SandboxSupervisor(pairs["caller"][0], pairs["init"][0], 0, RunProcesses(None), confinement, run)
        supervisor._limits = {"memory_mb": 64}
        if sender == "cell":
            pairs["cell"][1].sendall(FINISHED)
        else:
            streams.send(pairs[sender][1], {"code": 0} if sender == "init" else {"cell": "1"})
        awaited = [pairs[sender][0], pairs["init"][0]]
        problem, message = supervisor.wait_for_message(pipes, awaited, time.monotonic() + 60)
        assert (problem, message) == ("more than 64 MB of memory", None)
        assert pairs[sender][0].recv(1, socket.MSG_PEEK)


@pytest.mark.parametrize(
    ("version", "counters", "expected"),
    [
        (2, {"memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 1\n"}, True),
        (2, {"memory.events": "low 0\nhigh 0\nmax 9\noom 0\noom_kill 1\noom_group_kill 1\n"}, False),
        (2, {"memory.events": "low 0\nhigh 0\nmax 9\noom 2\noom_kill 0\noom_group_kill 0\n"}, False),
        (1, {"memory.oom_control": "oom_kill 1\n", "memory.max_usage_in_bytes": str(72 << 20)}, True),
        (1, {"memory.oom_control": "oom_kill 1\n", "memory.max_usage_in_bytes": str(71 << 20)}, True),
        (1, {"memory.oom_control": "oom_kill 1\n", "memory.max_usage_in_bytes": str(60 << 20)}, False),
        (1, {"memory.oom_control": "oom_kill 0\n", "memory.max_usage_in_bytes": str(72 << 20)}, False),
    ],
)
def test_only_kills_for_the_own_limit_count(
    tmp_path: Path, version: int, counters: dict[str, str], expected: bool
) -> None:
    """The files of both versions; a host has one of them."""
    with cgroup_of_files(tmp_path, version, counters) as run:
        assert run.out_of_memory() is expected
