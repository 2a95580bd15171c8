"""Stacks of this process and of another, which may hold the GIL or be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from verl.utils.process_tree import why_not_running
from verl.utils.stacks import origin_of, own_stacks, stacks_of, users_frame

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HOLDS_THE_GIL = """
import ctypes
from verl.utils.stacks import enable_stack_dumps
enable_stack_dumps()
def never_lets_go():
    print("now", flush=True)
    while True: ctypes.PyDLL(None).sleep(600)
never_lets_go()
"""


def test_the_threads_of_this_process_are_told_by_identity():
    asked, over = threading.Event(), threading.Event()

    def waits_here():
        asked.set()
        over.wait(30)

    thread = threading.Thread(target=waits_here)
    thread.start()
    asked.wait(30)
    stack = own_stacks()[thread.ident]
    over.set()
    thread.join()
    assert "waits_here" in [frame.function for frame in stack]
    assert users_frame(stack).function == "waits_here", "a lock of the standard library is not where it waits"
    assert users_frame(stack).file == __file__


def test_whose_a_file_is():
    import torch

    import verl.protocol

    files = [verl.protocol.__file__, torch.__file__, threading.__file__, "<frozen runpy>", "/home/me/reward.py"]
    assert [origin_of(file) for file in files] == ["verl", "installed", "installed", "installed", "user"]


def test_a_service_thread_of_a_package_outside_site_packages_is_not_the_users(tmp_path, monkeypatch):
    """A bundle on PYTHONPATH, as on machines without a package index; Ray's collector thread waits in its `run`."""
    (tmp_path / "bundle" / "fakeray-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "bundle" / "fakeray").mkdir()
    source = (
        "import threading\n"
        "class Collector(threading.Thread):\n"
        "    def __init__(self):\n"
        "        super().__init__(daemon=True)\n"
        "        self.started_, self.over = threading.Event(), threading.Event()\n"
        "    def run(self):\n"
        "        self.started_.set()\n"
        "        self.over.wait(60)\n"
    )
    (tmp_path / "bundle" / "fakeray" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "bundle")
    import fakeray

    thread = fakeray.Collector()
    thread.start()
    thread.started_.wait(30)
    stack = own_stacks()[thread.ident]
    thread.over.set()
    thread.join()
    assert "run" in [frame.function for frame in stack]
    assert users_frame(stack) is None
    assert origin_of(str(tmp_path / "project" / "reward.py")) == "user"


def test_a_process_that_holds_the_gil_is_read_from_outside_and_a_stopped_one_is_known(tmp_path):
    script = tmp_path / "holds.py"
    script.write_text(HOLDS_THE_GIL)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"now\n"
        (stack,) = stacks_of(process.pid).values()
        assert [frame.function for frame in stack] == ["never_lets_go", "<module>"]
        assert users_frame(stack).file == str(script)
        assert stacks_of(process.pid), "again"
        assert why_not_running(process.pid) is None
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert why_not_running(process.pid) == "stopped"
        assert stacks_of(process.pid, timeout=0.2) == {}
    finally:
        process.kill()
        process.wait()
    assert why_not_running(process.pid) == "gone"


def test_a_process_that_never_offered_it_is_not_harmed():
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    try:
        process.stdout.readline()
        assert stacks_of(process.pid) == {}
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
