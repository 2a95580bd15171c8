"""A folder has one owner, who is named to others; the lock dies with its process and is not inherited."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from verl.utils.checkpoint import folders
from verl.utils.checkpoint.folders import OWNER_FILE, FolderOwnership, FolderTakenError

HOLDER = """
    import os, sys, time
    from verl.utils.checkpoint.folders import FolderOwnership
    owned = FolderOwnership(sys.argv[1])
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(60)  # a data loader's worker that outlives its parent
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def hold(folder: Path, how: str = "alone") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(folder), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def ended():
    """Process groups to end with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):  # nobody of it is left
            os.killpg(process.pid, 9)
        process.wait()


def test_a_second_run_is_refused_with_who_the_first_is(tmp_path, ended):
    ended.append(hold(tmp_path))
    with pytest.raises(FolderTakenError) as caught:
        FolderOwnership(tmp_path, timeout=0)
    owner = caught.value.owner
    assert (owner.host, owner.pid) == (socket.gethostname(), ended[0].pid)
    assert f"pid {ended[0].pid}, since 20" in str(caught.value)


def test_a_killed_run_leaves_no_lock_even_if_its_children_live_on(tmp_path, ended):
    ended.append(hold(tmp_path, "fork"))
    ended[0].kill()
    ended[0].wait()
    FolderOwnership(tmp_path, timeout=0).close()


def test_what_is_given_back_can_be_taken_and_two_in_one_process_share(tmp_path, ended):
    first, second = FolderOwnership(tmp_path), FolderOwnership(tmp_path / "." / "")
    first.close()
    first.close()
    probe = f"from verl.utils.checkpoint.folders import FolderOwnership; FolderOwnership({str(tmp_path)!r}, timeout=0)"
    held = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert "FolderTakenError" in held.stderr, "the second still holds it"
    second.close()
    assert (tmp_path / OWNER_FILE).read_bytes() == b""
    ended.append(hold(tmp_path))


def test_without_locks_an_owner_of_this_machine_is_found_by_its_process(tmp_path, ended, monkeypatch, caplog):
    ended.append(hold(tmp_path))

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "lockf", unsupported)
    with pytest.raises(FolderTakenError, match=f"pid {ended[0].pid}"):
        FolderOwnership(tmp_path, timeout=0)
    ended[0].kill()
    ended[0].wait()
    FolderOwnership(tmp_path, timeout=0).close()
    FolderOwnership(tmp_path / "fresh", timeout=0).close()
    assert "no locks on this file system" in caplog.text
