"""`Sandbox`: runs programs in processes that wait, already isolated, for one job each; futures and sessions of runs."""

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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl.sandbox import streams
from verl.sandbox.types import Isolation, Limits, Result, check_paths, find_language, search_path
from verl.utils.resources import available_cores

logger = logging.getLogger(__name__)

_ZYGOTE_COMMAND = (
    "import sys; sys.path[0] = sys.argv[2]; from verl.sandbox.zygote import main; del sys.path[0]; "
    "main(int(sys.argv[1]))"
)
_PACKAGES = str(Path(__file__).parents[2])
_START_SECONDS = 60.0
# The supervisor enforces time limits; if it is silent this much longer, it is considered dead.
GRACE_SECONDS = 15.0


@functools.lru_cache(maxsize=1)
def available() -> Isolation:
    """Return what this host can isolate. The first call starts a process."""
    zygote = _ZygoteProcess(probe=True)
    zygote.close()
    return zygote.isolation


class Sandbox:
    """Runs untrusted programs. Thread-safe.

    `require`: the minimum isolation, one of `REQUIRE`; IsolationMissing if the host has less. `warm`: isolated
    processes kept ready. `concurrency`: how many programs of `submit` run at once (0: one per core). `read`: paths that
    programs may read besides the installed software. `modules`: name and source of modules that are already imported in
    Python programs. `cgroup`: let the kernel count memory and processes if this process may create a cgroup.
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
        self._ready: deque[socket.socket] = deque()  # connections to runs that wait for a job
        self._zygote: _ZygoteProcess | None = None
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
        """Process id of the zygote, from which all runs descend."""
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
        """Run a program to its end.

        `files` are written to the program's directory before it starts; the files in `fetch` are read after its end.
        """
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
        """`run`, which `future.cancel()` in another thread ends early."""
        try:
            spec = find_language(language)
        except ValueError as error:
            return Result("refused", stderr=str(error))
        limits = limits or self.limits
        contents = {spec.file: code.encode(errors="surrogatepass"), **(files or {})}
        check_paths(contents, fetch)
        job = {
            **job_header(limits, limits.cpu_seconds()),
            "compile": list(spec.compile),
            "start": list(spec.start),
            "script": spec.file,
            "names": list(contents),
            "fetch": list(fetch),
        }
        timeout = limits.wall_s + (limits.compile_s if spec.compile else 0.0) + GRACE_SECONDS
        with self._take_ready() as link, future.connected(link):
            send_job(link, job, [stdin.encode(errors="surrogatepass"), *contents.values()], timeout)
            self._refill()
            return receive_result(link)[0]

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
            self._check_open()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._concurrency, "sandbox")
            self._threads.submit(run).add_done_callback(functools.partial(_cancel_dropped, future))
        return future

    def session(self, limits: Limits | None = None) -> Session:
        """Start a Python process that keeps its variables from cell to cell."""
        session = Session(self._take_ready(), limits or self.limits)
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
            self._stop()
        if threads is not None:
            threads.shutdown()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this sandbox was closed")

    def _take_ready(self) -> socket.socket:
        """Return the connection to a run that waits for its job. Restarts the zygote if it has ended."""
        with self._lock:
            self._check_open()
            if self._zygote is None or not self._zygote.alive():
                if self._zygote is not None:
                    logger.warning("sandbox: its zygote process ended; starting it again")
                self._zygote = self._start()
            return self._ready.popleft() if self._ready else self._zygote.fork()

    def _refill(self) -> None:
        """Fork new runs. Called after a job was sent, so that its program gets the CPU first."""
        with self._lock:
            if self._zygote is not None and self._zygote.alive():
                self._fill()

    def _start(self) -> _ZygoteProcess:
        self._stop()
        zygote = _ZygoteProcess(probe=False, **self._options)
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
        while len(self._ready) < self._warm:
            self._ready.append(self._zygote.fork())

    def _stop(self) -> None:
        while self._ready:
            self._ready.popleft().close()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


class _ZygoteProcess:
    """The process that forks the runs; it ends when its control socket is closed, also by the end of this process."""

    def __init__(
        self, probe: bool, read: Sequence[str] = (), modules: Mapping[str, str] | None = None, cgroup: bool = True
    ) -> None:
        if sys.platform != "linux":
            raise RuntimeError("the local sandbox needs Linux; elsewhere, use a sandbox server (sandbox_fusion.url)")
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-c", _ZYGOTE_COMMAND, str(theirs.fileno()), _PACKAGES],
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
            streams.send(self._control, {**options, "temporary": tempfile.gettempdir()})
            isolation, _, _ = streams.receive(self._control)
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError("the sandbox's zygote process failed to start; its error is on stderr") from error
        del isolation["sizes"]
        self.isolation = Isolation(**{**isolation, "missing": tuple(isolation["missing"])})
        weakref.finalize(self, _close_and_wait, self._process, self._control)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """False also in a fork of the process that started it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self) -> socket.socket:
        """Start a run, which isolates itself in the background; return the connection on which it receives its job."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"F"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        _close_and_wait(self._process, self._control)


def _cancel_dropped(future: RunFuture, task: Future[None]) -> None:
    """Cancel the future of a program that `Sandbox.close` has removed from the queue."""
    if task.cancelled():
        future.cancel()
        future.finish(None)


def _close_and_wait(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """The whole environment of programs. The hash seed is fixed: sets of strings have one order in every run."""
    return {
        "PATH": search_path(),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "USER": "sandbox",
    }


class RunFuture(Future[Result]):
    """A submitted program; unlike the future of a thread pool, it can be cancelled while the program runs.

    `cancel()` returns True unless the result is set already. A queued program never starts. A running one is killed
    with all its processes: the call only closes the sending side of the connection to the supervisor and returns; the
    thread of `Sandbox.submit`, and so the program's slot, is released once the supervisor has killed the process tree.
    Cancelling the task that awaits `asyncio.wrap_future(sandbox.submit(...))` therefore stops the program.
    """

    # The state stays PENDING until the program has ended: `Future.cancel` refuses RUNNING futures.

    def __init__(self) -> None:
        super().__init__()
        self._link: socket.socket | None = None
        self._link_lock = threading.Lock()

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        with self._link_lock:
            self._stop_program()
        return True

    def running(self) -> bool:
        return self._link is not None and not self.done()

    @contextlib.contextmanager
    def connected(self, link: socket.socket) -> Iterator[None]:
        """Within this context, `cancel` stops the program at the other end of `link`."""
        with self._link_lock:
            self._link = link
            if self.cancelled():
                self._stop_program()
        try:
            yield
        finally:
            with self._link_lock:
                self._link = None

    def finish(self, result: Result | None, error: BaseException | None = None) -> None:
        """Set the outcome, unless it was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        if error is not None:
            self.set_exception(error)
        elif result is not None:
            self.set_result(result)

    def _stop_program(self) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):  # the supervisor has closed its end
                self._link.shutdown(socket.SHUT_WR)


class Session:
    """A Python process that keeps its variables from cell to cell, like a notebook. Not thread-safe."""

    def __init__(self, link: socket.socket, limits: Limits) -> None:
        self._link = link
        self._send_lock = threading.Lock()  # an interrupt must not be sent within a cell
        self._owner = os.getpid()
        self._limits = limits
        cpu_s = limits.cpu_s and limits.cpu_seconds()
        send_job(link, {**job_header(limits, cpu_s), "session": True}, [], GRACE_SECONDS)
        self.alive = True

    def execute(self, code: str, wall_s: float | None = None) -> Result:
        """Run one cell; the value of its last expression is printed to stdout.

        A cell that takes longer than `wall_s` is interrupted (KeyboardInterrupt; the session continues). If it does not
        stop, the session is killed: `alive` is False then, and further cells are refused.
        """
        if not self.alive:
            return Result("refused", stderr="the session has ended; its variables are lost")
        wall_s = self._limits.wall_s if wall_s is None else wall_s
        with self._send_lock:
            send_job(self._link, {"cell": code, "wall_s": wall_s}, [], wall_s + GRACE_SECONDS)
        result, self.alive = receive_result(self._link)
        return result

    def interrupt(self) -> None:
        """Interrupt the running cell, as Ctrl-C does. Called from another thread."""
        with self._send_lock, contextlib.suppress(OSError):
            streams.send(self._link, {"interrupt": True})

    def close(self) -> None:
        """Kill the session and all its processes; a thread that waits for a cell gets its result now."""
        self.alive = False
        if self._owner == os.getpid():  # a forked process only closes its copy of the connection
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def job_header(limits: Limits, cpu_s: int | float | None) -> dict[str, Any]:
    names = ("wall_s", "memory_mb", "file_mb", "processes", "output_bytes", "compile_s")
    return {"session": False, "limits": {**{name: getattr(limits, name) for name in names}, "cpu_s": cpu_s}}


def send_job(link: socket.socket, job: dict[str, Any], blobs: Sequence[bytes], timeout: float) -> None:
    """Send a job. If the supervisor has ended, `receive_result` reports it."""
    link.settimeout(timeout)
    with contextlib.suppress(OSError):
        streams.send(link, job, blobs)


def receive_result(link: socket.socket) -> tuple[Result, bool]:
    """Wait for the result of a job; return it, and whether the session continues."""
    try:
        header, (stdout, stderr, *rest), _ = streams.receive(link)
    except (EOFError, OSError) as error:
        reason = "did not answer in time" if isinstance(error, TimeoutError) else "was killed"
        return Result("error", -9, stderr=f"[sandbox] the supervisor of this run {reason}"), False
    result = _result(header, stdout, stderr)
    if header["compile"] is not None:
        result.compile, rest = _result(header["compile"], rest[0], rest[1]), rest[2:]
    result.files = dict(zip(header["files"], rest, strict=True))
    return result, bool(header.get("alive"))


def _result(header: Mapping[str, Any], stdout: bytes, stderr: bytes) -> Result:
    texts = (stdout.decode(errors="replace"), stderr.decode(errors="replace"))
    return Result(header["status"], header["return_code"], *texts, header["seconds"])
