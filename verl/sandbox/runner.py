"""The caller's side: programs and sessions in processes that wait, isolated, for their one job."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl.sandbox import languages, wire
from verl.sandbox.outcome import Isolation, Limits, Result
from verl.sandbox.paths import check_paths
from verl.sandbox.run_future import RunFuture
from verl.utils.resources import available_cores

logger = logging.getLogger(__name__)

_SERVE = (
    "import sys; sys.path[0] = sys.argv[2]; from verl.sandbox.zygote import main; del sys.path[0]; "
    "main(int(sys.argv[1]))"
)
_PACKAGES = str(Path(__file__).parents[2])
_START_SECONDS = 60.0
# The keeper keeps the time; this much later it is taken for dead.
_GRACE_SECONDS = 15.0


@functools.lru_cache(maxsize=1)
def available() -> Isolation:
    """What this host can isolate. Costs a process, once."""
    zygote = _Zygote(probe=True)
    zygote.close()
    return zygote.isolation


class Sandbox:
    """Runs programs that are not trusted.

    `require`: the least isolation, one of `REQUIRE`; IsolationMissing where the host has less. `warm`: processes that
    wait ready. `concurrency`: how many of `submit` run at once (0: one for each core). `read`: paths that programs may
    read besides the installed ones. `modules`: name and source of modules that Python programs find imported.
    `cgroup`: let the kernel count memory and processes where this process may create a cgroup. Thread-safe.
    """

    def __init__(
        self,
        require: str = "files",
        limits: Limits = Limits(),  # noqa: B008 - frozen
        warm: int = 2,
        concurrency: int = 0,
        read: Sequence[str] = (),
        modules: Mapping[str, str] | None = None,
        cgroup: bool = True,
    ) -> None:
        self.limits = limits
        self._require = require
        self._warm = warm
        self._options: dict[str, Any] = {"read": list(read), "modules": modules or {}, "cgroup": cgroup}
        self._concurrency = concurrency or available_cores()
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._spares: deque[socket.socket] = deque()
        self._zygote: _Zygote | None = None
        self._isolation = self._start().isolation
        logger.info(
            "sandbox: %s, sandbox.require=%s%s",
            self._isolation,
            require,
            f"; missing: {'; '.join(self._isolation.missing)}" if self._isolation.missing else "",
        )

    @property
    def isolation(self) -> Isolation:
        return self._isolation

    @property
    def pid(self) -> int:
        """The process from which all runs descend."""
        assert self._zygote is not None
        return self._zygote.pid

    def run(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Result:
        """Run a program to its end. `files` are placed in its directory before, those of `fetch` read back after."""
        return self._run(RunFuture(), code, language, stdin, files, fetch, limits)

    def _run(
        self,
        future: RunFuture,
        code: str,
        language: str,
        stdin: str,
        files: Mapping[str, bytes] | None,
        fetch: Sequence[str],
        limits: Limits | None,
    ) -> Result:
        """`future.cancel()`, from another thread, ends it early."""
        kind, why_not = languages.find(language)
        if kind is None:
            return Result("refused", stderr=why_not)
        limits = limits or self.limits
        placed = {kind.file: code.encode(errors="surrogatepass"), **(files or {})}
        check_paths(placed, fetch)
        job = {
            **_job(limits, limits.processor_seconds()),
            "compile": list(kind.compile),
            "start": list(kind.start),
            "script": kind.file,
            "names": list(placed),
            "fetch": list(fetch),
        }
        patience = limits.wall_s + (limits.compile_s if kind.compile else 0.0) + _GRACE_SECONDS
        with self._spare() as link, future.connected(link):
            _tell(link, job, [stdin.encode(errors="surrogatepass"), *placed.values()], patience)
            self._refill()
            return _answer(link)[0]

    def submit(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> RunFuture:
        """`run` in the background, `concurrency` at once. `cancel()` of the future also stops a running program."""
        future = RunFuture()

        def run() -> None:
            if future.cancelled():
                future.finish(None)
                return
            try:
                result = self._run(future, code, language, stdin, files, fetch, limits)
            except BaseException as error:  # noqa: BLE001 - raised by `future.result()`
                future.finish(None, error)
            else:
                future.finish(result)

        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._concurrency, "sandbox")
            self._threads.submit(run).add_done_callback(functools.partial(_cancel_dropped, future))
        return future

    def session(self, limits: Limits | None = None) -> Session:
        """A Python of its own that remembers from cell to cell."""
        session = Session(self._spare(), limits or self.limits)
        self._refill()
        return session

    def close(self) -> None:
        """Kill running programs and cancel queued ones."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._drop()
        if threads is not None:
            threads.shutdown()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spare(self) -> socket.socket:
        """A run that waits for its job."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this sandbox was closed")
            if self._zygote is None or not self._zygote.alive():
                if self._zygote is not None:
                    logger.warning("sandbox: its first process ended; starting it again")
                self._zygote = self._start()
            return self._spares.popleft() if self._spares else self._zygote.fork()

    def _refill(self) -> None:
        """Make others ready; for after a job was sent, whose program then has the processor first."""
        with self._lock:
            if self._zygote is not None and self._zygote.alive():
                self._fill()

    def _start(self) -> _Zygote:
        self._drop()
        zygote = _Zygote(probe=False, **self._options)
        try:
            zygote.isolation.check(self._require)
        except BaseException:
            zygote.close()
            raise
        self._zygote = zygote
        self._fill()
        return zygote

    def _fill(self) -> None:
        assert self._zygote is not None
        while len(self._spares) < self._warm:
            self._spares.append(self._zygote.fork())

    def _drop(self) -> None:
        while self._spares:
            self._spares.popleft().close()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


class Session:
    """A Python process that remembers what its cells defined, like a notebook. Not to be shared by threads."""

    def __init__(self, link: socket.socket, limits: Limits) -> None:
        self._link = link
        self._owner = os.getpid()
        self._limits = limits
        _tell(link, {**_job(limits, limits.cpu_s and limits.processor_seconds()), "session": True}, [], _GRACE_SECONDS)
        self.alive = True

    def execute(self, code: str, wall_s: float | None = None) -> Result:
        """Run one cell; the value of its last expression is shown on stdout.

        One that takes longer than `wall_s` is interrupted (KeyboardInterrupt; the session goes on) and, if it does not
        stop, killed with the session (`alive` is False then, and every further cell refused).
        """
        if not self.alive:
            return Result("refused", stderr="the session has ended; what it remembered is lost")
        wall_s = self._limits.wall_s if wall_s is None else wall_s
        _tell(self._link, {"cell": code, "wall_s": wall_s}, [], wall_s + _GRACE_SECONDS)
        result, self.alive = _answer(self._link)
        return result

    def interrupt(self) -> None:
        """From another thread: as Ctrl-C would."""
        with contextlib.suppress(OSError):
            wire.send(self._link, {"interrupt": True})

    def close(self) -> None:
        """End it and all it started; a thread that waits for a cell gets its answer now."""
        self.alive = False
        if self._owner == os.getpid():  # a fork that is through with its copy ends nothing
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Zygote:
    """The process that forks the runs; it ends when the socket to it is closed, also by the end of this process."""

    def __init__(
        self, probe: bool, read: Sequence[str] = (), modules: Mapping[str, str] | None = None, cgroup: bool = True
    ) -> None:
        if sys.platform != "linux":
            raise RuntimeError("the local sandbox needs Linux; elsewhere, use a sandbox server (sandbox_fusion.url)")
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-c", _SERVE, str(theirs.fileno()), _PACKAGES],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
                cwd="/",
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._control.settimeout(_START_SECONDS)
        try:
            options = {"probe": probe, "read": list(read), "modules": modules or {}, "cgroup": cgroup}
            wire.send(self._control, {**options, "temporary": tempfile.gettempdir()})
            found, _, _ = wire.receive(self._control)
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError("the sandbox's first process ended at its start; its words are on stderr") from error
        del found["sizes"]
        self.isolation = Isolation(**{**found, "missing": tuple(found["missing"])})
        self._end = weakref.finalize(self, _wait_for, self._process, self._control)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """Also False in a fork of its owner, to whom it does not belong."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self) -> socket.socket:
        """A run that makes itself ready; it takes its job when it is."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"F"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        _wait_for(self._process, self._control)


def _cancel_dropped(future: RunFuture, task: Future[None]) -> None:
    """Cancel the future of a program that `Sandbox.close` has removed from the queue."""
    if task.cancelled():
        future.cancel()
        future.finish(None)


def _wait_for(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _job(limits: Limits, cpu_s: int | float | None) -> dict[str, Any]:
    names = ("wall_s", "memory_mb", "file_mb", "processes", "output_bytes", "compile_s")
    return {"session": False, "limits": {**{name: getattr(limits, name) for name in names}, "cpu_s": cpu_s}}


def _tell(link: socket.socket, job: dict[str, Any], blobs: Sequence[bytes], patience: float) -> None:
    """Send a job. A keeper that is gone is found out when it does not answer."""
    link.settimeout(patience)
    with contextlib.suppress(OSError):
        wire.send(link, job, blobs)


def _answer(link: socket.socket) -> tuple[Result, bool]:
    """What the keeper says, and whether it goes on."""
    try:
        header, (stdout, stderr, *rest), _ = wire.receive(link)
    except (EOFError, OSError) as error:
        words = "did not answer in time" if isinstance(error, TimeoutError) else "was killed"
        return Result("error", -9, stderr=f"[sandbox] the process that watches this run {words}"), False
    result = _result(header, stdout, stderr)
    if header["compile"] is not None:
        result.compile, rest = _result(header["compile"], rest[0], rest[1]), rest[2:]
    result.files = dict(zip(header["files"], rest, strict=True))
    return result, bool(header.get("alive"))


def _result(header: Mapping[str, Any], stdout: bytes, stderr: bytes) -> Result:
    texts = (stdout.decode(errors="replace"), stderr.decode(errors="replace"))
    return Result(header["status"], header["return_code"], *texts, header["seconds"])


def _environment() -> dict[str, str]:
    """All that programs see of an environment. Sets of strings have one order in every run."""
    return {
        "PATH": languages.search_path(),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "USER": "sandbox",
    }
