"""Files that go into a program's directory and come out of it: names, sizes, and where the directory is."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.sandbox import Limits, Sandbox

ROOT = Path(__file__).parents[3]
SEED = 32


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    limits = Limits(wall_s=20.0, memory_mb=256, file_mb=8, output_bytes=1000)
    with Sandbox(require="none", limits=limits) as sandbox:
        yield sandbox


def bad_names() -> list[str]:
    """Names that no file in a program's directory can have."""
    generator = random.Random(SEED)
    names = ["", "/", "/etc/passwd", "..", "a/..", "a/../../b", ".", "./", "a/", "a\0b", "\ud800", "a/\udfff/b"]
    names += ["x" * 256, "é" * 128, "/".join(["x" * 200] * 6), "x" * 100_000, "../" * 1000 + "etc/passwd"]
    parts = ["..", "a", "\0", "\udc80", "x" * 300, "/"]
    while len(names) < 60:
        name = "/".join(generator.choices(parts, k=generator.randint(1, 6)))
        if {"..", "\0", "\udc80", "x" * 300} & set(name.split("/")):
            names.append(name)
    return names


@pytest.mark.parametrize("place", ["files", "fetch"])
def test_a_name_that_cannot_be_is_the_callers_mistake(sandbox: Sandbox, place: str) -> None:
    for name in bad_names():
        shown = name if len(name) <= 100 else name[:100] + "…"
        with pytest.raises(ValueError, match=re.escape(f"sandbox file {shown!r}: ")) as caught:
            sandbox.run("", files={name: b""} if place == "files" else None, fetch=[name] if place == "fetch" else [])
        message = str(caught.value)
        assert len(message) < 1000
        assert str(ROOT) not in message
        assert tempfile.gettempdir() + "/verl" not in message


def test_unusual_names_that_can_be(sandbox: Sandbox) -> None:
    names = ["a b", "ü/ñ.txt", "-rf", "a..b", "...", "new\nline", "'\"", "x" * 255, "./dot", "a//b", "\U0001f600"]
    result = sandbox.run("print('done')", files={name: name.encode() for name in names}, fetch=names)
    assert (result.status, result.files) == ("finished", {name: name.encode() for name in names})


def test_too_many_names_and_names_in_each_others_way(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match=r"\b1000001\b.*\b1024\b"):
        sandbox.run("", fetch=[f"f{number}" for number in range(1_000_000)])
    with pytest.raises(ValueError, match="'a/b'"):
        sandbox.run("", files={"a": b"", "a/b": b""})


def test_fetched_files_together_are_limited_by_output_bytes(sandbox: Sandbox) -> None:
    code = "for name in 'abc': open(name, 'w').write(name * 600)"
    result = sandbox.run(code, fetch=["a", "b", "c", "a"])
    assert (result.status, result.files) == ("output", {"a": b"a" * 600, "b": b"b" * 400, "c": b""})


def test_only_plain_files_are_fetched(sandbox: Sandbox) -> None:
    code = """
import os, socket
os.mkfifo("fifo"); os.symlink("/etc/passwd", "link"); os.symlink("/etc", "folder"); os.mkdir("directory")
open("closed", "w").write("x"); os.chmod("closed", 0)
with open("sparse", "wb") as file: file.truncate(4 << 20)
with open("written", "w") as file: file.write("yes")
"""
    names = ["fifo", "link", "folder/passwd", "directory", "written", "never", "sparse"]
    result = sandbox.run(code, fetch=names)
    assert (result.status, result.files) == ("output", {"written": b"yes", "sparse": bytes(997)})


def test_files_that_do_not_fit_are_reported_without_paths_of_the_host(sandbox: Sandbox) -> None:
    if not sandbox.isolation.namespaces:
        pytest.skip("without namespaces the disk has space")
    result = sandbox.run("print(1)", files={"big": bytes(9 << 20)})
    assert result.status == "error"
    assert result.stderr == "[sandbox] a file could not be written: No space left on device\n"


def test_a_file_that_a_left_process_keeps_writing(sandbox: Sandbox) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    with open("grows", "wb", 0) as file:
        while True: file.write(bytes(100))
time.sleep(0.2)
"""
    result = sandbox.run(code, fetch=["grows"])
    assert (result.status, len(result.files["grows"])) == ("output", 1000)


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_folders_of_programs_are_below_the_callers_tmpdir(tmp_path: Path, mode: int) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == Path.home().owner() and not folder.stat().st_mode & 0o001:  # pytest's are closed to others
            folder.chmod(0o755)
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(mode)
    code = """
from verl.sandbox import Sandbox, seccomp
seccomp.simulate_missing(["namespaces"])
with Sandbox(require="none", warm=0) as sandbox:
    print(sandbox.run("import os; print(os.getcwd())").stdout, sandbox.isolation.missing)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(own)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    if mode == 0o700 and os.geteuid() == 0:  # its programs have another user
        assert re.search(rf"TMPDIR={own} is closed to other users", done.stdout)
    else:
        assert done.stdout.startswith(f"{own}/verl-sandbox-")
    assert os.listdir(own) == []
