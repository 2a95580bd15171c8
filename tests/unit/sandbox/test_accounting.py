"""Memory, kernel memory and processes of a run are limited, with a cgroup and without; ordinary programs still work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sandbox_attacks.host import NOBODY, python_for
from verl.sandbox import Limits, Sandbox, available

ROOT = Path(__file__).parents[3]
LIMITS = Limits(wall_s=30.0, memory_mb=192, file_mb=16, processes=32)


@pytest.fixture(scope="module", params=[True, False], ids=["cgroup", "no cgroup"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param and not available().cgroup:
        pytest.skip("this process may not create a cgroup")
    with Sandbox(require="none", limits=LIMITS, cgroup=request.param) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def without_cgroup() -> Iterator[Sandbox]:
    with Sandbox(require="none", limits=LIMITS, cgroup=False) as sandbox:
        yield sandbox


ORDINARY = {
    "numpy": "import numpy as np\nx = np.ones((1000, 1000))\nprint((x @ x).sum())",
    "threads": """
import threading
threads = [threading.Thread(target=bytearray, args=(100_000,)) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("done")
""",
    "multiprocessing": """
import multiprocessing as mp
def add(values, number):
    with values.get_lock(): values[0] += number
values = mp.Array("i", 10)
workers = [mp.Process(target=add, args=(values, n)) for n in range(4)]
for worker in workers: worker.start()
for worker in workers: worker.join()
with mp.Pool(3) as pool: print(values[0], pool.map(abs, range(-3, 0)))
""",
    "shared anonymous memory": """
import mmap, os
memory = mmap.mmap(-1, 1 << 20)
if os.fork() == 0:
    memory[:5] = b"hello"; os._exit(0)
os.wait(); print(memory[:5])
""",
    "sqlite": """
import sqlite3
db = sqlite3.connect("a.db"); db.execute("create table t (x)")
db.executemany("insert into t values (?)", [(n,) for n in range(1000)]); db.commit()
print(db.execute("select sum(x) from t").fetchone())
""",
    "asyncio with a subprocess": """
import asyncio, sys, tempfile
async def main():
    with tempfile.NamedTemporaryFile() as file: file.write(b"x")
    process = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
    print(await process.communicate())
asyncio.run(main())
""",
    "folders without permissions": """
import os
os.makedirs("a/b"); os.chmod("a", 0o500); open("a/b/c", "w").write("x"); print(os.listdir("a"))
""",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_run_within_their_limits(sandbox: Sandbox, name: str) -> None:
    result = sandbox.run(ORDINARY[name])
    assert (result.status, result.stderr) == ("finished", "")
    assert result.stdout


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("javascript", "const a = new Array(1e6).fill(1); console.log(a.length)"),
        ("cpp", '#include <thread>\n#include <cstdio>\nint main() { std::thread([] { puts("1000000"); }).join(); }'),
        ("shell", "head -c 1000000 /dev/urandom | cat | wc -c"),
    ],
)
def test_other_languages_run_within_their_limits(sandbox: Sandbox, language: str, code: str) -> None:
    result = sandbox.run(code, language)
    if result.status == "refused":
        pytest.skip(result.stderr)
    assert (result.status, result.stdout) == ("finished", "1000000\n"), result


PAGE_TABLES = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for _ in range(3): os.fork()
address = libc.mmap(None, 60 << 30, 1, 0x4022, -1, 0)
for at in range(address, address + (60 << 30), 1 << 21): ctypes.c_char.from_address(at).value
time.sleep(20)
"""
SOCKETS = """
import os, socket, time
for _ in range(4): os.fork()
held = []
while True:
    try:
        pair = socket.socketpair(); held.append(pair)
        for end in pair:
            end.setblocking(False)
            while True: end.send(bytes(32768))
    except BlockingIOError: pass
    except OSError: break
time.sleep(20)
"""


@pytest.mark.parametrize("code", [PAGE_TABLES, SOCKETS], ids=["page tables", "socket buffers"])
def test_kernel_memory_counts(sandbox: Sandbox, code: str) -> None:
    result = sandbox.run(code)
    assert (result.status, result.return_code) == ("memory", -signal.SIGKILL)
    assert "more than 192 MB of memory" in result.stderr


LEAVE_CGROUP = """
import os, time
for line in open("/proc/self/cgroup"):
    _, names, path = line.strip().split(":", 2)
    if names in ("memory", "pids") and "verl-sandbox-" in path:
        with open(f"/sys/fs/cgroup/{names}{path.split('/verl-sandbox-')[0]}/tasks", "w") as file: file.write("0")
for _ in range(3):
    if os.fork() == 0: break
held = b"x" * (100 << 20)
time.sleep(3)
"""
DELEGATED = """
import os, sys
from pathlib import Path
from tests.support.sandbox_attacks import host
from verl.sandbox import Limits, Sandbox, cgroup
names, parents = cgroup._find_parents()
folders = [Path(parent) / f"verl-test-{os.getpid()}" for parent in parents]
for folder in folders:
    folder.mkdir()
    for path in (folder, *folder.iterdir()): os.chown(path, host.NOBODY, host.NOBODY)
    (folder / "cgroup.procs").write_text(str(os.getpid()))
child = os.fork()
if child == 0:
    host.restrict("namespaces,landlock", host.NOBODY)
    with Sandbox(require="none", warm=1, limits=Limits(memory_mb=192)) as sandbox:
        print(sandbox.isolation.cgroup, sandbox.run(sys.stdin.read()).status, flush=True)
    os._exit(0)
os.waitpid(child, 0)
for folder, parent in zip(folders, parents):
    (Path(parent) / "cgroup.procs").write_text(str(os.getpid()))
    folder.rmdir()
"""


def test_a_program_that_could_leave_its_cgroup_is_measured() -> None:
    """A cgroup that is delegated to the user of the program, without namespaces and Landlock."""
    python = python_for(NOBODY)
    if available().cgroup != 1 or os.geteuid() != 0 or python is None:
        pytest.skip("needs cgroup v1, root, and an interpreter that an ordinary user may read")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-c", DELEGATED]
    done = subprocess.run(command, input=LEAVE_CGROUP, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "0 memory\n", done.stderr


def test_processes_are_limited(sandbox: Sandbox) -> None:
    code = """
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0: time.sleep(20); os._exit(0)
        made += 1
except OSError: pass
print(made)
"""
    assert sandbox.run(code).stdout == "31\n"


def test_calls_that_pin_kernel_memory_seem_not_to_exist(sandbox: Sandbox) -> None:
    if not sandbox.isolation.seccomp:
        pytest.skip("no seccomp here")
    code = """
import ctypes, errno, struct
libc = ctypes.CDLL(None, use_errno=True)
arm = __import__("os").uname().machine == "aarch64"
calls = [(444, struct.pack("=QQ", 0, 3)), (277 if arm else 317, 1), (26 if arm else 294, 0), (0 if arm else 206, 1)]
for number, first in calls:
    print(libc.syscall(number, first, 16, 0), errno.errorcode[ctypes.get_errno()])
for option in (22, 78):  # a seccomp filter, a table of futexes
    print(libc.prctl(option, 1, 16, 0, 0), errno.errorcode[ctypes.get_errno()])
print(libc.close_range(100, 101, 2), errno.errorcode[ctypes.get_errno()], libc.close_range(100, 101, 0))
# A thread with its own descriptors.
print(libc.syscall(220 if arm else 56, 0x10D00 & ~0x400, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
"""
    assert sandbox.run(code).stdout == "-1 ENOSYS\n" * 4 + "-1 EPERM\n" * 2 + "-1 EPERM 0\n-1 EPERM\n"


def test_attributes_of_files_seem_not_to_be_supported(sandbox: Sandbox) -> None:
    if not sandbox.isolation.seccomp:
        pytest.skip("no seccomp here")
    code = """
import os, shutil
open("a", "w").close()
for name in ("user.a", "system.posix_acl_access"):
    try: os.setxattr("a", name, b"x")
    except OSError as error: print(error.errno)
shutil.copy2("a", "b"); print(os.system("cp -a a c"), sorted(os.listdir()))
"""
    result = sandbox.run(code)
    assert result.stdout == "95\n95\n0 ['a', 'b', 'c', 'main.py']\n", result.stderr


def test_large_shared_mappings_need_a_cgroup(sandbox: Sandbox) -> None:
    code = "import mmap\nmemory = mmap.mmap(-1, 32 << 20)\nmemory[-1:] = b'x'\nprint(len(memory))"
    result = sandbox.run(code)
    if sandbox.isolation.cgroup:
        assert result.stdout == "33554432\n"
    elif sandbox.isolation.seccomp:
        assert result.stderr.endswith("OSError: [Errno 12] Cannot allocate memory\n")


def test_zero_bytes_can_be_read_but_not_mapped(without_cgroup: Sandbox) -> None:
    if not without_cgroup.isolation.namespaces:
        pytest.skip("no namespaces here; /dev/zero cannot be opened then")
    code = """
import mmap
with open("/dev/zero", "rb") as file:
    print(file.read(3))
    try: mmap.mmap(file.fileno(), 1 << 20, access=mmap.ACCESS_READ)
    except OSError as error: print(error.errno)
"""
    assert without_cgroup.run(code).stdout == "b'\\x00\\x00\\x00'\n19\n"


def test_a_session_that_exceeds_its_memory_says_so(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        result = session.execute(PAGE_TABLES)
    assert (result.status, session.alive) == ("memory", False)


def test_cgroups_are_removed_also_those_of_a_killed_sandbox() -> None:
    if not available().cgroup:
        pytest.skip("this process may not create a cgroup")
    code = """
import os
from verl.sandbox import Sandbox
sandbox = Sandbox(require="none", warm=1)
print(sandbox.run("print(open('/proc/self/cgroup').read())").stdout, sandbox.pid, flush=True)
os.kill(sandbox.pid, 9); os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    name = next(part for part in killed.stdout.replace(":", "/").split("/") if part.startswith("verl-sandbox-"))
    with Sandbox(require="none", warm=1) as sandbox:
        assert sandbox.run("print(1)").stdout == "1\n"
        own = sandbox.run("print(open('/proc/self/cgroup').read())").stdout
    give_up = time.monotonic() + 20
    own_name = next(part for part in own.replace(":", "/").split("/") if part.startswith("verl-sandbox-"))
    while left := [place for place in Path("/sys/fs/cgroup").rglob("verl-sandbox-*") if place.name in (name, own_name)]:
        assert time.monotonic() < give_up, left
        time.sleep(0.05)
