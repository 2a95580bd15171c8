"""Hosts that can isolate less: refused, told, and weaker only where the caller says so."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.sandbox import Isolation, IsolationMissing, Sandbox, available
from verl.sandbox.linux import ARCH
from verl.sandbox.seccomp import CALL_NUMBERS
from verl.utils import process_tree

ROOT = Path(__file__).parents[3]


def on_a_host_without(features: str, code: str) -> str:
    """stdout of a program whose kernel refuses `features`."""
    start = f"from verl.sandbox import seccomp; seccomp.simulate_missing({features.split(',')!r})\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", start + code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_levels_in_words() -> None:
    full = Isolation(namespaces=True, landlock=7, seccomp=True)
    assert (full.level, Isolation(namespaces=True).level) == ("full", "network")
    assert (Isolation(landlock=1).level, Isolation(landlock=1, seccomp=True).level) == ("files", "network")
    assert (Isolation(seccomp=True).level, Isolation().level) == ("none", "none")
    full.check("full")
    with pytest.raises(ValueError, match=r"sandbox\.require='all': .*none, files, network, full"):
        full.check("all")
    with pytest.raises(IsolationMissing, match=r"require=files.*no Landlock.*sandbox_fusion\.url"):
        Isolation(seccomp=True, missing=("no namespaces", "no Landlock")).check("files")


def test_a_host_without_file_isolation_is_refused_by_default() -> None:
    code = """
from verl.sandbox import IsolationMissing, Sandbox, available
print(available().level, available().missing)
try: Sandbox()
except IsolationMissing as error: print(error)
with Sandbox(require="none") as weak: print(weak.run("print(6 * 7)").stdout)
"""
    found = on_a_host_without("namespaces,landlock", code)
    assert found.startswith("none ('no namespaces ([Errno 1] unshare: Operation not permitted)', 'no Landlock'")
    assert "sandbox.require=files, but this host only offers 'none'" in found
    assert found.endswith("42\n\n")


def test_landlock_alone_is_enough_for_files() -> None:
    if available().landlock == 0:
        pytest.skip("no Landlock here")
    code = f"""
from verl.sandbox import Sandbox
with Sandbox() as sandbox:
    print(sandbox.isolation.level)
    print(sandbox.run("open({str(ROOT / "pyproject.toml")!r})").stderr.splitlines()[-1])
    print(sandbox.run("open('mine', 'w').write('x'); import os; print(sorted(os.listdir('.')))").stdout)
    print(sandbox.run("import os, tempfile; print(tempfile.gettempdir() == os.getcwd())").stdout)
    session = sandbox.session()
    print(session.execute("import sqlite3, os; os.getcwd() == os.environ['HOME']").stdout)
"""
    found = on_a_host_without("namespaces", code).split("\n")
    assert found[0] == "network"
    assert found[1].startswith("PermissionError")
    assert found[2:] == ["['main.py', 'mine']", "", "True", "", "True", "", ""]


def test_numbers_of_system_calls_are_this_kernels() -> None:
    if shutil.which("gcc") is None or ARCH < 0:
        pytest.skip("needs gcc, on x86-64 or arm64")
    command = ["gcc", "-E", "-dM", "-include", "sys/syscall.h", "-xc", os.devnull]
    defined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", defined)}
    ours = {name: numbers[ARCH] for name, numbers in CALL_NUMBERS.items()}
    assert {name: number for name, number in ours.items() if theirs.get(name, number) != number} == {}


def test_root_that_cannot_become_another_user_runs_programs() -> None:
    """As in a container without privileges whose user namespace maps only user 0."""
    unshare = ["unshare", "--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this process may not create user namespaces with `unshare`")
    code = """
from verl.sandbox import Sandbox
with Sandbox(require="none") as sandbox:
    print(sandbox.run("print(6 * 7)"))
"""
    command = [*unshare, sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert "status='finished'" in output
    assert "stdout='42\\n'" in output


@pytest.mark.parametrize("features", [[], ["namespaces"]])
def test_nothing_stays_when_the_caller_is_killed(tmp_path: Path, features: list[str]) -> None:
    code = f"""
import os, time
from verl.sandbox import Sandbox, seccomp
seccomp.simulate_missing({features})
sandbox = Sandbox(require="none")
sandbox.submit("import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(600)")
session = sandbox.session()
folder = session.execute("import os; print(os.getcwd())").stdout
with open("facts.new", "w") as file: file.write(f"{{sandbox.pid}} {{folder}}")
os.rename("facts.new", "facts")
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=tmp_path)
    try:
        _wait_until(lambda: (tmp_path / "facts").exists())
        zygote, folder = (tmp_path / "facts").read_text().split()
        # The zygote, two spares, the session, and the program with its fork: a keeper, an init and a program each.
        _wait_until(lambda: len(process_tree.with_descendants(int(zygote))) == 14)
        family = process_tree.with_descendants(int(zygote))
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    _wait_until(lambda: not [pid for pid in family if process_tree.why_not_running(pid) is None])
    assert not os.path.exists(folder)


def test_a_killed_zygote_is_started_again() -> None:
    with Sandbox(require="none") as sandbox:
        os.kill(sandbox.pid, signal.SIGKILL)
        _wait_until(lambda: process_tree.why_not_running(sandbox.pid) is not None)
        assert sandbox.run("print(1)").stdout == "1\n"


def _wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)
