"""Programs for the sandbox server that a malicious client sends: endless, large, forking, escaping."""

from __future__ import annotations

__all__ = ["FETCHED", "PROGRAMS", "SLEEPING"]

SLEEPING = "import time; time.sleep(60)"

PROGRAMS: dict[str, str] = {
    "endless": "while True: pass",
    "sleep": SLEEPING,
    "fork-bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\nprint(1)",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "memory-children": "import os\nfor _ in range(8): os.fork()\nx = bytearray(200 << 20)\nimport time; time.sleep(5)",
    "stdout-flood": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "stderr-flood": "import sys\nwhile True: sys.stderr.write('y' * 65536)",
    "binary-output": "import sys\nsys.stdout.buffer.write(bytes(range(256)) * 100)",
    "nul-output": "import sys\nsys.stdout.buffer.write(bytes(1000))",
    "surrogate-output": r"import sys; sys.stdout.buffer.write(b'\xed\xa0\x80\xff')",
    "ignore-signals": "import signal\nfor n in (15, 2, 1, 3): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    "kill-all": "import os\nos.kill(-1, 9)",
    "kill-parent": "import os\nos.kill(os.getppid(), 9)\nwhile True: pass",
    "stop-itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "exit-codes": "import os\nos._exit(255)",
    "close-files": "import os\nos.closerange(0, 4096)\nwhile True: pass",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "syntax": "def (:",
    "nul-source": "print(1)\0",
    "surrogate-source": "# -*- coding: utf-16 -*-\nprint(1)",
    "long-line": "x = 0" + "+1" * 100_000,
    "nested-source": "(" * 10_000 + ")" * 10_000,
    "disk": "import os\nn = 0\nwhile True:\n    open(f'f{n}', 'wb').write(bytes(1 << 20)); n += 1",
    "many-files": "n = 0\nwhile True:\n    open(f'f{n}', 'w').close(); n += 1",
    "deep-directories": "import os\nwhile True:\n    os.mkdir('d' * 200); os.chdir('d' * 200)",
    "unreadable-directory": "import os\nos.makedirs('a/b'); open('a/b/c', 'w').write('x' * 10**6); os.chmod('a', 0)",
    "read-environment": "import os; print(dict(os.environ)); print(open('/proc/self/environ').read())",
    "network": "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
    "big-number": "print(10 ** 10 ** 7 % 7)",
}

# What the program leaves in its directory under the name "x", which is fetched.
FETCHED: dict[str, str] = {
    "large-file": "open('x', 'wb').write(bytes(48 << 20))",
    "sparse-file": "open('x', 'wb').truncate(100 << 30)",
    "growing-file": "import os\nf = open('x', 'wb')\nif os.fork() == 0:\n    while True: f.write(bytes(1 << 20))",
    "symlink-outside": "import os; os.symlink('/etc/passwd', 'x')",
    "symlink-proc": "import os; os.symlink('/proc/self/mem', 'x')",
    "symlink-loop": "import os; os.symlink('x', 'x')",
    "symlink-zero": "import os; os.symlink('/dev/zero', 'x')",
    "fifo": "import os; os.mkfifo('x')",
    "socket": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('x')",
    "directory": "import os; os.mkdir('x')",
    "unreadable": "import os; open('x', 'w').write('1'); os.chmod('x', 0)",
    "hard-link": "import os; os.link('/etc/passwd', 'x')",
    "missing": "pass",
    "swapped": "import os\nopen('y', 'w').close()\nif os.fork() == 0:\n"
    "    while True:\n        os.symlink('/etc/passwd', 'z'); os.replace('z', 'x'); os.replace('y', 'x')\n"
    "        open('y', 'w').close()",
}
