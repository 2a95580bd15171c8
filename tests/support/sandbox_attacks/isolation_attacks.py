"""Programs that attack the isolation of the sandbox; each prints ESCAPED where it succeeds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attack:
    """`code` uses `G`, the addresses of its targets. `stops_at`: the lowest level of `REQUIRE` that prevents it."""

    name: str
    code: str
    stops_at: str = "none"
    fetch: tuple[str, ...] = ()


# Every program starts with this, after `G`.
PRELUDE = """
def tries(what, action):
    try:
        if action() is False:
            return
    except (OSError, ValueError) as error:
        print(what, "failed:", error)
    else:
        print("ESCAPED:", what)
"""

ATTACKS = (
    Attack(
        "fork bomb",
        """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            time.sleep(60); os._exit(0)
        made += 1
except OSError as error:
    print(made, error, flush=True)
if made >= 64: print("ESCAPED: 64 processes", flush=True)
while True:
    try: os.fork()
    except OSError: pass
""",
    ),
    Attack("memory bomb", "x = []\nwhile True: x.append(bytearray(10 << 20))"),
    Attack(
        "memory bomb of many processes",
        """
import os, time
filled, has_filled = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        x = b"x" * (64 << 20); os.write(has_filled, b"."); time.sleep(60)
for _ in range(8): os.read(filled, 1)
time.sleep(1)  # success only if the processes survive with this memory
print("ESCAPED: 512 MB")
""",
    ),
    Attack(
        "memory bomb of a thread's processes",
        """
import os, threading, time
filled, has_filled = os.pipe()
def start():
    for _ in range(8):
        if os.fork() == 0:
            x = b"x" * (64 << 20); os.write(has_filled, b"."); time.sleep(60)
    time.sleep(60)
threading.Thread(target=start, daemon=True).start()
for _ in range(8): os.read(filled, 1)
time.sleep(1)
print("ESCAPED: 512 MB")
""",
    ),
    Attack(
        "shared memory bomb",
        """
import mmap, os, time
x = mmap.mmap(-1, 600 << 20)
for part in range(6):  # each child fills a part and ends: no process has these pages in its page table
    if os.fork() == 0:
        for i in range(100 * part, 100 * (part + 1)): x[i << 20 : (i + 1) << 20] = bytes(1 << 20)
        os._exit(0)
    os.wait()
time.sleep(0.2)
print("ESCAPED: 600 MB")
""",
    ),
    Attack(
        "endless loop that ignores signals",
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: pass",
    ),
    Attack(
        "10 GB file",
        """
import signal
try:
    with open("big", "wb") as f:
        for _ in range(10 << 10): f.write(bytes(1 << 20))
    print("ESCAPED: 10 GB")
except OSError as error: print(error)
""",
    ),
    Attack(
        "10 GB in many files",
        """
import time
try:
    for i in range(1 << 10):
        with open(f"big{i}", "wb") as f: f.write(bytes(10 << 20))
        time.sleep(0.01)
    print("ESCAPED: 10 GB")
except OSError as error: print(error)
""",
    ),
    Attack(
        "10 GB in files without a name",
        """
import os, time
held = []
try:
    while len(held) < 40:
        held.append(open("big", "wb"))
        os.remove("big")
        held[-1].write(bytes(5 << 20)); held[-1].flush()
        time.sleep(0.02)
    print("ESCAPED: 200 MB")
except OSError as error: print(error)
""",
    ),
    Attack(
        "reading the home directory",
        'import os\ntries("secret", lambda: open(G["file"]).read())\ntries("home", lambda: os.listdir(G["folder"]))\n'
        'tries("write", lambda: open(G["folder"] + "/planted", "w"))',
        "files",
    ),
    Attack(
        "changing modes and times in the home directory",
        """
import os
for action in (
    lambda: os.utime(G["file"], (0, 0)), lambda: os.chmod(G["file"], 0o666), lambda: os.chmod(G["folder"], 0o777),
    lambda: os.setxattr(G["file"], "user.planted", b"x"), lambda: os.truncate(G["file"], 0),
):
    try: action()
    except OSError as error: print(error)
""",
        "network",
    ),
    Attack(
        "reading the environment",
        """
import os
tries("own environment", lambda: G["mark"] in str(os.environ))
for name, pid in (("caller's", G["parent"]), ("another process's", G["victim"]), ("init's", os.getppid())):
    tries(name + " environment", lambda: G["mark"] in open(f"/proc/{pid}/environ").read())
""",
        "files",
    ),
    Attack(
        "reading another process's memory",
        """
import ctypes
tries("mem", lambda: open(f"/proc/{G['victim']}/mem", "rb"))
tries("maps", lambda: open(f"/proc/{G['victim']}/maps").read(1) != "")
libc = ctypes.CDLL(None, use_errno=True)
data = ctypes.create_string_buffer(8)
vector = (ctypes.c_uint64 * 2)(ctypes.addressof(data), 8)
away = (ctypes.c_uint64 * 2)(G["address"], 8)
if libc.process_vm_readv(G["victim"], ctypes.byref(vector), 1, ctypes.byref(away), 1, 0) == 8:
    print("ESCAPED: process_vm_readv")
""",
        "files",
    ),
    Attack(
        "ptrace",
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in (G["victim"], os.getppid(), 1):
    if libc.ptrace(16, pid, None, None) == 0: print("ESCAPED: ptrace")
    print(os.strerror(ctypes.get_errno()))
""",
        "files",
    ),
    Attack(
        "sockets to loopback",
        """
import socket
tries("tcp", lambda: socket.create_connection(("127.0.0.1", G["port"]), 1))
tries("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + G["mark"]))
tries("path", lambda: socket.socket(socket.AF_UNIX).connect(G["folder"] + "/socket"))
pair = lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]
tries("datagrams by a pair", lambda: pair().sendto(b"out", G["folder"] + "/datagrams"))
""",
        "network",
    ),
    Attack(
        "sockets to the outside",
        """
import socket
def udp():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.sendto(b"out", (G["host"], G["port"]))
tries("tcp", lambda: socket.create_connection((G["host"], G["port"]), 1))
tries("udp", udp)
""",
        "network",
    ),
    Attack(
        "sockets past the network: hypervisor, kernel crypto",
        """
import socket
tries("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
tries("kernel crypto", lambda: socket.socket(38, socket.SOCK_SEQPACKET))
""",
        "full",
    ),
    Attack(
        "killing the parent",
        """
import os, signal
for name in ("parent", "victim", "zygote"): tries("signal to " + name, lambda: os.kill(G[name], 0))
try: os.kill(G["victim"], signal.SIGKILL)
except OSError as error: print(error)
for pid in {os.getppid(), 1}:
    for number in (signal.SIGSTOP, signal.SIGKILL):
        try: os.kill(pid, number)
        except OSError as error: print(error)
print("still here")
""",
        "network",
    ),
    Attack(
        "killing by a descriptor",
        """
import fcntl, os, signal, struct
reading, writing = os.pipe()
for action in (
    lambda: fcntl.fcntl(reading, fcntl.F_SETOWN, G["victim"]),
    lambda: fcntl.fcntl(reading, 15, struct.pack("ii", 1, G["victim"])),
    lambda: fcntl.ioctl(reading, 0x8901, struct.pack("i", G["victim"])),
):
    try: action()
    except OSError as error: print(error)
fcntl.fcntl(reading, 10, signal.SIGKILL)
fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)
if fcntl.fcntl(reading, fcntl.F_GETOWN) == G["victim"]: os.write(writing, b"x")
""",
        "network",
    ),
    Attack(
        "limits and priority of other processes",
        """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
victim = G["victim"]
tries("limits", lambda: resource.prlimit(victim, resource.RLIMIT_CORE, (0, 0)))
tries("processors", lambda: os.sched_setaffinity(victim, os.sched_getaffinity(0)))
tries("scheduling", lambda: os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0)))
tries("priority", lambda: os.setpriority(os.PRIO_PROCESS, victim, 1))
number = 30 if os.uname().machine == "aarch64" else 251
tries("priority of its disk", lambda: libc.syscall(number, 1, victim, 2 << 13) == 0)
""",
        "network",
    ),
    Attack(
        "daemonising",
        """
import os, time
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid() if os.getpid() != os.getsid(0) else None
            time.sleep(60)
        os._exit(0)
""",
    ),
    Attack(
        "symlinks as results",
        """
import os
os.symlink(G["file"], "file")
os.symlink(G["folder"], "folder")
os.mkfifo("fifo")
tries("link", lambda: open("file").read())
tries("hard link", lambda: os.link(G["file"], "hard"))
tries("up", lambda: open("../" * 20 + G["file"]).read())
""",
        "files",
        ("file", "folder/secret", "fifo", "hard"),
    ),
    Attack(
        "tricks with /proc",
        """
import os
for path in ("/proc/self/root", "/proc/1/root", f"/proc/{os.getppid()}/root", f"/proc/{os.getppid()}/cwd"):
    tries("secret past its root", lambda: open(path + G["file"]).read())
    tries("secret past its root", lambda: open(path + "/.." + G["file"]).read())
for number in range(256):
    tries("secret by a descriptor", lambda: os.open(G["file"][1:], os.O_RDONLY, dir_fd=number))
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/1/mem"):
    tries(path, lambda: os.open(path, os.O_WRONLY))
""",
        "files",
    ),
    Attack(
        "namespaces, mounts and root",
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"/", b"/tmp", None, 4096, None) == 0: print("ESCAPED: mount")
if libc.umount2(b"/proc", 2) == 0: print("ESCAPED: umount")
tries("root", lambda: os.setuid(0))
tries("chroot", lambda: os.chroot("."))
tries("device", lambda: os.mknod("device", 0o600 | 0o060000, os.makedev(8, 0)))
tries("usr", lambda: open("/usr/planted", "w"))
tries("raw disk", lambda: [os.open(path, os.O_RDONLY) for path in ("/dev/vda", "/dev/sda", "/dev/kmsg")])
""",
        "none",
    ),
    Attack(
        "a zip bomb as output",
        """
import sys, zipfile
with zipfile.ZipFile("bomb.zip", "w", zipfile.ZIP_DEFLATED) as z:
    with z.open("zeros", "w") as f:
        for _ in range(64): f.write(bytes(1 << 20))
for n in range(4):
    try:
        with open(f"sparse{n}", "wb") as f: f.truncate((1 << 34) if n == 0 else (16 << 20))
    except OSError as error: print(error)
for _ in range(64): sys.stdout.write("0" * (1 << 20))
""",
        "none",
        ("bomb.zip", "sparse0", "sparse1", "sparse2", "sparse3"),
    ),
    Attack(
        "leaving shared memory behind",
        'import ctypes\nctypes.CDLL(None).shmget(G["key"], 1 << 20, 0o1666)',
        "network",
    ),
    Attack(
        "leaving files behind",
        """
import os
for folder in ("/dev/shm", "/tmp", "/var/tmp", os.path.expanduser("~")):
    try: open(f"{folder}/{G['name']}", "w").write("left")
    except OSError as error: print(error)
for _ in range(1500):
    os.mkdir("d"); os.chdir("d")
os.chmod(".", 0)
""",
        "files",
    ),
)
