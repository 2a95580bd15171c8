"""Programs that try to use more memory or disk space than their limits, each by one mechanism of the kernel.

`python benchmarks/sandbox_attacks.py --measure` runs them and records the maximum that they reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.support.sandbox_attacks.resource_programs import (
    FILES_OF_THREADS,
    FIRST_THREAD_ENDED,
    MANY_MAPPINGS,
    PAGE_TABLES,
    PARALLEL_PRIVATE,
    SOCKETS_OF_THREADS,
    SPARSE_PAGE_TABLES,
    STACK,
)


@dataclass(frozen=True, slots=True)
class ResourceAttack:
    """`resource`: what is limited and measured. `charged`: the kernel counts it in the cgroup of the process."""

    name: str
    code: str
    resource: Literal["memory", "disk"] = "memory"
    language: str = "python"
    charged: bool = True


# Prelude of the Python programs. Each allocates up to TARGET bytes and holds them for half a second.
PRELUDE = """
import ctypes, mmap, os, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.syscall.restype = ctypes.c_long
ARM = os.uname().machine == "aarch64"
MB, TARGET = 1 << 20, 3 << 30
def in_processes(count, work):
    for index in range(count):
        try:
            if os.fork() == 0:
                try: work(index)
                finally: time.sleep(0.5)
        except OSError: break
    work(count)
    time.sleep(0.5)
def until_error(work):
    try:
        while True: work()
    except OSError: pass
"""

RESOURCE_ATTACKS = (
    ResourceAttack("private memory, one process", "held = []\nwhile True: held.append(bytearray(10 << 20))"),
    ResourceAttack("private memory, 16 processes", PARALLEL_PRIVATE, language="cpp"),
    ResourceAttack("private memory behind 780,000 mappings", MANY_MAPPINGS, language="cpp"),
    ResourceAttack("private memory, first thread ended", FIRST_THREAD_ENDED, language="cpp"),
    ResourceAttack("growing stack mapping", STACK, language="cpp"),
    ResourceAttack("page tables, dense", PAGE_TABLES, language="cpp"),
    ResourceAttack("page tables, sparse, 9 processes", SPARSE_PAGE_TABLES, language="cpp"),
    ResourceAttack(
        "shared anonymous memory, unmapped but for a page",
        """
part = 4 * MB
for _ in range(TARGET // part):
    address = libc.mmap(None, part, 3, 0x21, -1, 0)
    if address in (None, 2**64 - 1): break
    libc.memset(address, 1, part)
    libc.munmap(address + 4096, part - 4096)
time.sleep(0.5)
""",
    ),
    ResourceAttack(
        "memfd, not mapped",
        """
descriptor = libc.syscall(279 if ARM else 319, b"x", 0)
for _ in range(TARGET // MB):
    if os.write(descriptor, bytes(MB)) <= 0: break
time.sleep(0.5)
""",
    ),
    ResourceAttack(
        "System V shared memory",
        """
libc.shmat.restype = ctypes.c_void_p
libc.shmdt.argtypes = [ctypes.c_void_p]
for _ in range(TARGET // (32 * MB)):
    segment = libc.shmget(0, 32 * MB, 0o1600)
    if segment < 0: break
    address = libc.shmat(segment, None, 0)
    libc.memset(address, 1, 32 * MB); libc.shmdt(address)
time.sleep(0.5)
""",
    ),
    ResourceAttack(
        "files in /dev/shm",
        """
def write():
    with open(f"/dev/shm/x{time.monotonic_ns()}", "wb") as file: file.write(bytes(8 * MB))
until_error(write)
time.sleep(0.5)
""",
    ),
    ResourceAttack(
        "Landlock rulesets",
        """
def rulesets(_):
    for _ in range(128):
        ruleset = libc.syscall(444, struct.pack("=QQ", 0, 3), 16, 0)
        if ruleset < 0: return
        for port in range(65536):
            if libc.syscall(445, ruleset, 2, struct.pack("=QQ", 1, port), 0) < 0: break
in_processes(4, rulesets)
""",
    ),
    ResourceAttack(
        "seccomp filters",
        """
code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000) * 4000)
program = struct.pack("=H6xQ", 4000, ctypes.addressof(code))
def filters(_):
    libc.prctl(38, 1, 0, 0, 0)
    while libc.prctl(22, 2, program, 0, 0) == 0: pass
in_processes(56, filters)
""",
    ),
    ResourceAttack(
        "socket buffers",
        """
held = []
def pairs(_):
    def add():
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24); end.setblocking(False)
            until_error(lambda: end.send(bytes(32768)))
        held.append((ours, theirs))
    until_error(add)
in_processes(40, pairs)
""",
    ),
    ResourceAttack("socket buffers, descriptors of threads", SOCKETS_OF_THREADS, language="cpp"),
    ResourceAttack(
        "connections that are not accepted",
        """
def connect(index):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"socket{index}"); listener.listen(4096)
    def add():
        with socket.socket(socket.AF_UNIX) as peer:
            peer.setblocking(False); peer.connect(f"socket{index}")
            until_error(lambda: peer.send(bytes(32768)))
    until_error(add)
    globals()[f"listener{index}"] = listener
in_processes(4, connect)
""",
    ),
    ResourceAttack(
        "datagrams that are not read",
        """
held = []
def send(index):
    while True:
        with_buffer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"d{index}-{len(held)}"
        with_buffer.bind(name); held.append(with_buffer)
        for _ in range(12):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
                peer.setblocking(False)
                try: peer.sendto(bytes(200000), name)
                except BlockingIOError: break
in_processes(16, lambda index: until_error(lambda: send(index)))
""",
    ),
    ResourceAttack(
        "pipe buffers",
        """
import fcntl
def pipes(_):
    def add():
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        try: fcntl.fcntl(writing, 1031, MB)
        except OSError: pass
        until_error(lambda: os.write(writing, bytes(65536)))
    until_error(add)
in_processes(40, pipes)
""",
    ),
    ResourceAttack(
        "epoll entries",
        """
import select
files = [os.eventfd(0) for _ in range(20)]
pollers = [select.epoll() for _ in range(60)]
low = max(files[-1], pollers[-1].fileno()) + 1
for poller in pollers:
    for file in files:
        for number in range(low, 250):
            os.dup2(file, number)
            try: poller.register(number, select.EPOLLIN)
            except OSError: pass
time.sleep(0.5)
""",
    ),
    ResourceAttack(
        "inotify events",
        """
for _ in range(128):
    watcher = libc.inotify_init1(0)
    if watcher < 0: break
    libc.inotify_add_watch(watcher, b".", 0xFFF)
names = ["x" * 200 + str(index) for index in range(8)]
for _ in range(2000):
    for name in names: open(name, "w").close()
time.sleep(0.5)
""",
    ),
    ResourceAttack(
        "file locks",
        """
import fcntl
def locks(index):
    for number in range(200):
        file = os.open(f"locked{index}-{number}", os.O_RDWR | os.O_CREAT)
        for offset in range(0, 8000, 2): fcntl.lockf(file, fcntl.LOCK_EX, 1, offset)
in_processes(8, lambda index: until_error(lambda: locks(index)))
""",
    ),
    ResourceAttack(
        "access control lists of files",
        """
entries = [(1, 2**32 - 1), *[(2, os.getuid())] * 8000, (4, 2**32 - 1), (16, 2**32 - 1), (32, 2**32 - 1)]
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, 7, user) for tag, user in entries)
number = 0
def make():
    global number
    os.mkdir(f"{number}")
    for kind in ("access", "default"): os.setxattr(f"{number}", f"system.posix_acl_{kind}", acl)
    number += 1
until_error(make)
time.sleep(0.5)
""",
        charged=False,
    ),
    ResourceAttack(
        "tables of futexes",
        """
in_processes(11, lambda _: libc.prctl(78, 1, ctypes.c_ulong(1 << 22), 0, 0))
""",
    ),
    ResourceAttack(
        "contexts of asynchronous I/O",
        """
context = ctypes.c_ulong()
while libc.syscall(0 if ARM else 206, 1, ctypes.byref(context)) == 0: context.value = 0
time.sleep(0.5)
""",
    ),
    ResourceAttack(
        "timers",
        """
timer = ctypes.c_long()
while libc.timer_create(1, None, ctypes.byref(timer)) == 0: pass
time.sleep(0.5)
""",
    ),
    ResourceAttack(
        "kernel stacks of threads",
        """
threading.stack_size(65536)
def start(): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
try:
    while True: start()
except RuntimeError: time.sleep(0.5)
""",
    ),
    ResourceAttack(
        "files",
        """
def write():
    with open(f"x{time.monotonic_ns()}", "wb") as file: file.write(bytes(8 * MB))
until_error(write)
time.sleep(0.5)
""",
        "disk",
    ),
    ResourceAttack(
        "files in unreadable folders",
        """
def write():
    name = f"d{time.monotonic_ns()}"
    os.mkdir(name)
    with open(name + "/x", "wb") as file:
        os.chmod(name, 0)
        file.write(bytes(8 * MB))
    time.sleep(0.005)
until_error(write)
time.sleep(0.5)
""",
        "disk",
    ),
    ResourceAttack(
        "files below paths of 300,000 bytes",
        """
def write():
    os.mkdir("d" * 200); os.chdir("d" * 200)
for _ in range(1500): write()
def fill():
    with open(f"x{time.monotonic_ns()}", "wb") as file: file.write(bytes(8 * MB))
    time.sleep(0.005)
until_error(fill)
time.sleep(0.5)
""",
        "disk",
    ),
    ResourceAttack(
        "open files without a name",
        """
held = []
def write():
    held.append(open("x", "wb")); os.remove("x")
    held[-1].write(bytes(8 * MB)); held[-1].flush()
until_error(write)
time.sleep(0.5)
""",
        "disk",
    ),
    ResourceAttack("open files without a name, descriptors of a thread", FILES_OF_THREADS, "disk", "cpp"),
    ResourceAttack(
        "mapped files without a name",
        """
held = []
def write():
    with open("x", "w+b") as file:
        file.write(bytes(8 * MB)); file.flush()
        held.append(libc.mmap(None, 4096, 1, 2, file.fileno(), 0))
    os.remove("x")
until_error(write)
time.sleep(0.5)
""",
        "disk",
    ),
    ResourceAttack(
        "files in flight between sockets",
        """
held = []
def write():
    ours, theirs = socket.socketpair()
    with open("x", "wb") as file:
        socket.send_fds(ours, [b"x"], [file.fileno()])
        os.remove("x")
        file.write(bytes(8 * MB))
    held.append((ours, theirs))
until_error(write)
time.sleep(0.5)
""",
        "disk",
    ),
    ResourceAttack(
        "empty files",
        """
number = 0
def make():
    global number
    os.close(os.open(f"{number:0200}", os.O_CREAT | os.O_WRONLY)); number += 1
until_error(make)
time.sleep(0.5)
""",
        "disk",
    ),
)
