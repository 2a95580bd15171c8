"""Probes during an attack: latency of GET /health; memory, processes and open descriptors of the server.

The machine is loaded by the attack itself, and latencies contain what the machine adds. Two measurements of that part:
the time in which threads of the server were ready to run and had no CPU (schedstat of the kernel), and the latency of
a control server that does nothing else and is probed at the same time.
"""

from __future__ import annotations

import contextlib
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.attacks.support.servers import RunningServer

__all__ = ["HealthProbe", "Level", "MemoryProbe", "control_server", "percentile"]

_INTERVAL_S = 0.05
_MEMORY_INTERVAL_S = 0.25
_TIMEOUT_S = 30.0
_KILL_BYTES = 6 << 30
_REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

_CONTROL = """
import asyncio
async def respond(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\n{}")
    await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextlib.contextmanager
def control_server() -> Iterator[tuple[str, int]]:
    """(url, pid) of an idle server in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", _CONTROL], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}", process.pid
    finally:
        process.kill()
        process.wait()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


class _Sampler:
    """Calls `_sample` from a thread until `stop`."""

    _interval_s: float

    def start(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._sample()
            self._ended.wait(self._interval_s)

    def _sample(self) -> None:
        raise NotImplementedError


class HealthProbe(_Sampler):
    """Seconds of each GET /health, on a new connection each; `failures` are other responses than 200.

    `own_seconds` are without the longest time that one thread of the process `pid` waited for a CPU meanwhile.
    """

    _interval_s = _INTERVAL_S

    def __init__(self, url: str, pid: int) -> None:
        parts = urlsplit(url)
        self._pid = pid
        self._address = (str(parts.hostname), int(parts.port or 80))
        self.began: list[float] = []
        self.seconds: list[float] = []
        self.own_seconds: list[float] = []
        self.failures: list[str] = []

    def _sample(self) -> None:
        waited, began = _seconds_without_cpu(self._pid), time.monotonic()
        try:
            with socket.create_connection(self._address, timeout=_TIMEOUT_S) as connection:
                connection.sendall(_REQUEST)
                status = connection.makefile("rb").readline()
        except OSError as error:
            status = repr(error).encode()
        self.began.append(began)
        self.seconds.append(time.monotonic() - began)
        delays = [delay - waited.get(thread, 0.0) for thread, delay in _seconds_without_cpu(self._pid).items()]
        self.own_seconds.append(max(0.0, self.seconds[-1] - max(delays, default=0.0)))
        if b" 200 " not in status:
            self.failures.append(f"after {self.seconds[-1]:.2f} s: {status.decode(errors='replace').strip()}")


def _seconds_without_cpu(pid: int) -> dict[str, float]:
    """Per thread of a process: how long it was ready to run and had no CPU, since it started."""
    delays = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # the thread has ended, or the kernel does not count
            delays[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return delays


@dataclass(frozen=True)
class Level:
    """What the process tree of a server uses."""

    memory: int
    """Bytes, as `MemoryProbe` counts them."""
    processes: int
    descriptors: int
    """Open files and sockets; those that processes share count once per process."""


class MemoryProbe(_Sampler):
    """Memory of the server's process tree, and every process that it ever had.

    Memory is anonymous and shared memory in proportion to the processes that share it (PSS), so that forks count their
    common pages once, and swap. Pages of files do not count: the kernel can drop them, and their proportion depends on
    which other programs of the machine have mapped the same file.
    """

    _interval_s = _MEMORY_INTERVAL_S

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self.peak = 0
        self.processes: dict[tuple[int, float], psutil.Process] = {}

    def level(self) -> Level:
        """Slow, for an idle server."""
        tree = self._server.tree()
        descriptors = 0
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                descriptors += process.num_fds()
        return Level(sum(_proportional_bytes(process.pid) for process in tree), len(tree), descriptors)

    def alive(self) -> list[psutil.Process]:
        """Processes of the server that still run."""
        return [process for process in self.processes.values() if _runs(process)]

    def _sample(self) -> None:
        tree = self._server.tree()
        for process in tree:
            with contextlib.suppress(psutil.Error):
                self.processes.setdefault((process.pid, process.create_time()), process)
        # The proportion takes long to read. It is never above the resident memory, which does not.
        if sum(_resident_bytes(process.pid) for process in tree) > self.peak:
            self.peak = max(self.peak, sum(_proportional_bytes(process.pid) for process in tree))
        if self.peak > _KILL_BYTES:  # before the kernel kills other programs of the machine
            self._server.process.kill()


def _resident_bytes(pid: int) -> int:
    """Anonymous and shared memory of a process, without regard to other processes that share it."""
    return _sum_fields(pid, "status", ("RssAnon:", "RssShmem:", "VmSwap:"))


def _proportional_bytes(pid: int) -> int:
    """Anonymous and shared memory of a process in proportion to the processes that share it."""
    return _sum_fields(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))


def _sum_fields(pid: int, file: str, names: tuple[str, ...]) -> int:
    """The sum of fields of a file in /proc, in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
