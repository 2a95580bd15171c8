"""Run the attacks on the isolation of the sandbox and detect the damage they did.

`Targets` are outside of the sandbox: a secret file, a secret in the environment, a process with data in its memory,
listening sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.sandbox_attacks.isolation_attacks import ATTACKS, PRELUDE
from verl.sandbox import Limits, Result, Sandbox
from verl.utils import process_tree

LIMITS = Limits(wall_s=2.0, memory_mb=192, file_mb=16, processes=32, output_bytes=1 << 16)
_IDLE_SECONDS = 5.0
_IDLE_PROCESSES = 4  # the zygote, and a warm run: supervisor, init, program
_VICTIM = (
    "import ctypes, time; x = ctypes.create_string_buffer(b'12345678'); print(ctypes.addressof(x), flush=True); "
    "time.sleep(600)"
)


class Targets:
    """The targets that attacks try to read or change, and detection of the damage and of leftover objects."""

    def __init__(self) -> None:
        self.mark = "mark" + secrets.token_hex(8)
        self.folder = tempfile.mkdtemp(prefix="verl-targets-")
        self._secret = Path(self.folder, "secret")
        self._place_secret()
        # Set in every environment except those of the sandbox's programs.
        os.environ["TARGET_SECRET"] = self.mark
        self._start_victim()
        self._listener = socket.create_server(("0.0.0.0", 0))
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._datagrams.bind(("0.0.0.0", self._listener.getsockname()[1]))
        self._datagrams.setblocking(False)
        self._unix = []
        for address in ("\0" + self.mark, self.folder + "/socket"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address)
            listener.listen()
            self._unix.append(listener)
        self._unix_datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._unix_datagrams.bind(self.folder + "/datagrams")
        self._unix_datagrams.setblocking(False)
        self._name = "left" + secrets.token_hex(8)
        self._key = secrets.randbits(30)

    def _place_secret(self) -> None:
        self._secret.unlink(missing_ok=True)
        self._secret.write_text(self.mark)
        self._secret.chmod(0o600)
        os.chmod(self.folder, 0o700)
        self._initial_state = self._state()

    def _state(self) -> tuple[object, ...]:
        status = self._secret.stat()
        attributes = os.listxattr(self._secret)
        return status.st_mode, status.st_mtime, status.st_size, attributes, os.stat(self.folder).st_mode

    def _start_victim(self) -> None:
        self._victim = subprocess.Popen([sys.executable, "-c", _VICTIM], stdout=subprocess.PIPE, start_new_session=True)
        assert self._victim.stdout is not None
        self._address = int(self._victim.stdout.readline())

    def addresses(self, zygote: int) -> dict[str, object]:
        return {
            "file": self.folder + "/secret",
            "folder": self.folder,
            "mark": self.mark,
            "name": self._name,
            "parent": os.getpid(),
            "zygote": zygote,
            "victim": self._victim.pid,
            "address": self._address,
            "port": self._listener.getsockname()[1],
            "host": _own_address(),
            "key": self._key,
        }

    def harm(self, result: Result) -> list[str]:
        """Describe the damage that a program did; undo it."""
        text = result.stdout + result.stderr
        reached = [line.partition("ESCAPED: ")[2] for line in text.splitlines() if line.startswith("ESCAPED: ")]
        damage = [f"reached {', '.join(dict.fromkeys(reached))}"] if reached else []
        if self.mark in text or any(self.mark.encode() in content for content in result.files.values()):
            damage.append("read the secret")
        if self._victim.poll() is not None:
            damage.append("killed another process")
            self._start_victim()
        if os.path.exists(self.folder + "/planted"):
            os.remove(self.folder + "/planted")
            damage.append("wrote into the home directory")
        if self._state() != self._initial_state:
            self._place_secret()
            damage.append("changed the secret's mode, times or size")
        for listener in (self._datagrams, self._unix_datagrams):
            with contextlib.suppress(BlockingIOError):
                listener.recv(100)
                damage.append("sent a datagram")
        if sum(map(len, result.files.values())) + len(text) > 3 * LIMITS.output_bytes:
            damage.append("more output than allowed")
        return damage + self._left_behind()

    def _left_behind(self) -> list[str]:
        damage = []
        for folder in ("/dev/shm", "/tmp", "/var/tmp", os.path.expanduser("~")):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, self._name))
                damage.append(f"left a file in {folder}")
        libc = ctypes.CDLL(None)
        segment = libc.shmget(self._key, 0, 0)
        if segment >= 0:
            libc.shmctl(segment, 0, None)
            damage.append("left shared memory")
        return damage

    def close(self) -> None:
        self._victim.kill()
        self._victim.wait()
        for listener in (self._listener, self._datagrams, self._unix_datagrams, *self._unix):
            listener.close()
        shutil.rmtree(self.folder)
        os.environ.pop("TARGET_SECRET", None)


def _own_address() -> str:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def run_attacks(require: str = "none", names: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """Run all attacks, or those with these names; return a row per attack with its damage as text ("" for none)."""
    rows = []
    targets = Targets()
    try:
        with Sandbox(require=require, limits=LIMITS, warm=1) as sandbox:
            sandbox.run("")
            idle = _wait_until_idle(sandbox.pid)
            for attack in ATTACKS:
                if names and attack.name not in names:
                    continue
                code = f"G = {targets.addresses(sandbox.pid)!r}\n{PRELUDE}\n{attack.code}"
                result = sandbox.run(code, fetch=attack.fetch)
                harm = targets.harm(result)
                left = _wait_until_idle(sandbox.pid, idle) - idle
                if left > 0:
                    harm.append(f"left {left} processes")
                after = sandbox.run("print(1 + 1)", limits=Limits(wall_s=60.0))
                if after.stdout != "2\n":
                    harm.append(f"the next program does not run: {after}")
                rows.append(
                    {
                        "attack": attack.name,
                        "ended": result.status,
                        "harm": "; ".join(harm),
                        "stops_at": attack.stops_at,
                    }
                )
    finally:
        targets.close()
    return rows


def _wait_until_idle(zygote: int, expected: int = _IDLE_PROCESSES) -> int:
    """The number of processes once there are `expected`, or after a few seconds."""
    give_up = time.monotonic() + _IDLE_SECONDS
    while (count := len(process_tree.with_descendants(zygote))) != expected and time.monotonic() < give_up:
        time.sleep(0.02)
    return count
