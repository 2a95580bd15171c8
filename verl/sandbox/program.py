"""Inside a run: the init process, and the program process that drops all rights and executes the model's code.

The init starts one program process after the other, adopts orphans, and kills what a program leaves behind.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import linecache
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from verl.sandbox import filesystem, linux, seccomp, streams
from verl.sandbox.cgroup import RunCgroup
from verl.utils import process_tree

# Reports of a cell.
STARTED, FINISHED, ERROR, MEMORY = b"S", b"F", b"E", b"M"
_MAX_PENDING_SIGNALS = 4096  # queued signals and POSIX timers
_ADDRESS_SPACE = 64 << 30  # at most 128 MB of page tables, unless it is used sparsely


@dataclass(frozen=True, slots=True)
class Confinement:
    """How programs are isolated on this host, and their folder."""

    namespaces: bool
    landlock: int
    """ABI of Landlock; 0: not used."""
    seccomp: bool
    own_user: bool
    """Whether each run changes to a user id of its own, which needs root."""
    paths: tuple[str, ...]
    """Paths that a program may read (`filesystem.readable_paths`)."""
    folder: str = filesystem.WORK
    """The program's working directory."""
    has_cgroup: bool = False
    """Whether a cgroup counts memory and processes."""
    capability: int | None = None
    """A capability that programs keep, to read an interpreter that only root may read; Landlock restricts its use."""

    @property
    def tmp(self) -> str:
        return "/tmp" if self.namespaces else self.folder

    @property
    def can_access_user_files(self) -> bool:
        """Whether the program can open files outside of its folder as their owner, or by a capability."""
        return not self.namespaces and (not self.own_user or self.capability is not None)

    @property
    def counts_own_processes(self) -> bool:
        """Whether RLIMIT_NPROC counts only processes of this run."""
        return self.own_user or (self.namespaces and linux.counts_processes_by_namespace())

    @property
    def can_leave_cgroup(self) -> bool:
        """Whether the program can write to the files of a cgroup: its user owns them, and nothing hides them."""
        return not (self.namespaces or self.landlock or self.own_user)

    def apply(self) -> None:
        """Confine this process, and all that it starts, permanently. The init has dropped capabilities already."""
        os.setsid()
        linux.die_with_parent()
        if self.landlock and self.namespaces:
            linux.landlock_restrict(["/"], ["/tmp", "/dev/shm"], filesystem.DEVICES)
        elif self.landlock:
            linux.landlock_restrict(self.paths, [self.folder], filesystem.devices(self.has_cgroup))
        if self.seccomp:
            signals_confined = self.namespaces or self.landlock >= 6
            signal_target = None if signals_confined else os.getpid()
            seccomp.install_filter(self.namespaces, signal_target, self.can_access_user_files, self.has_cgroup)


# -- init --------------------------------------------------------------------------------------------------------


def run_and_exit(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` in a forked process and end the process with its result."""
    status = 1
    try:
        status = main() or 0
    except BaseException:  # noqa: BLE001 - the process ends here; the reason is on the stderr of the sandbox
        traceback.print_exc()
    finally:
        os._exit(status)


def run_init(link: socket.socket, confinement: Confinement, cgroup: RunCgroup | None = None) -> int:
    """Run one program process per job that arrives over `link`; kill its descendants and send its exit code.

    If programs cannot be isolated, send the reason as `refused` instead.
    """
    linux.die_with_parent()
    if cgroup is not None:
        cgroup.enter()
        cgroup.close()  # no program gets its descriptors
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"1000")  # if the machine runs out of memory, the kernel kills this first
    if confinement.namespaces:
        filesystem.mount_proc()
    process_tree.adopt_orphans()
    linux.drop_capabilities(confinement.capability)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the program, which has the same user, cannot read this process
    while True:
        try:
            child = _start_program(link, confinement)
        except OSError as error:
            streams.send(link, {"refused": str(error)})
            return 1
        code = None
        while code is None:
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
        kill_descendants()
        streams.send(link, {"code": code})
        if not link.recv(1, socket.MSG_PEEK):
            return 0


def _start_program(link: socket.socket, confinement: Confinement) -> int:
    """Fork a process that isolates itself and waits for its job; return its pid. OSError: it could not be isolated."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:

        def run_program() -> int:
            try:
                main = _isolate(confinement)
            except OSError as error:
                os.write(writing, (str(error) or repr(error)).encode())
                return 1
            os.close(writing)
            return _run_job(link, main)

        run_and_exit(run_program)
    os.close(writing)
    with open(reading, "rb") as pipe:
        problem = pipe.read()
    if problem:
        raise OSError(problem.decode(errors="replace"))
    return child


def kill_descendants() -> None:
    """Kill all processes that this process started or adopted, until none is left."""
    while True:
        if os.getpid() == 1:  # of a process namespace: -1 is everything in it
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            for child in process_tree.children(os.getpid()):
                process_tree.kill_tree(child)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


# -- program -----------------------------------------------------------------------------------------------------


def _isolate(confinement: Confinement) -> types.ModuleType:
    """Isolate this process and do everything else that does not depend on the job; return an empty `__main__`. OSError:
    isolation failed."""
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # the supervisor reads its /proc; the filter forbids to change it later
    _warm_up()  # before seccomp forbids sending descriptors
    confinement.apply()
    os.chdir(confinement.folder)
    os.environ.update(HOME=confinement.folder, PWD=confinement.folder, TMPDIR=confinement.tmp)
    tempfile.tempdir = None  # cached by the parent process, which has another folder
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _fresh_main(confinement.folder)


def _run_job(link: socket.socket, main: types.ModuleType) -> int:
    """Wait for one job over `link` and execute it; return its exit status."""
    initial_bytes = process_tree.data_bytes() or 64 << 20
    try:
        job, blobs, descriptors = streams.receive(link, 4)
    except EOFError:
        return 0
    channel = _install_descriptors(descriptors)
    files = dict(zip(job["files"], blobs, strict=True))
    try:
        _write_files(files)
    except OSError as error:
        os.write(2, f"[sandbox] a file could not be written: {error.strerror}\n".encode())
        return 1
    _set_limits(job["limits"], initial_bytes)
    if job["start"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python alone ignores it
        return _exec(job["start"])
    if job["script"] is None:
        return _serve_cells(channel, main)
    process = os.getpid()
    code = _run_script(job["script"], files[job["script"]], main)
    if os.getpid() == process:  # not a fork that reached the end of the script
        with contextlib.suppress(OSError):
            os.write(channel, bytes([code]))
    return code


def _warm_up() -> None:
    """Execute once what a job executes, so that the memory pages that it writes are copied before the job starts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        streams.send(ours, {"start": [], "limits": {"processes": 1}}, [b""], [ours.fileno()])
        for descriptor in streams.receive(theirs, 1)[2]:
            os.close(descriptor)
    with open(os.devnull, "w", encoding="utf-8") as devnull:
        code = "import math\ndef f(x):\n    return [str(y) for y in range(x)]\nprint(f(9), math.pi, file=devnull)"
        exec(compile(code, "warm-up", "exec"), {"devnull": devnull})


def _install_descriptors(received: list[int]) -> int:
    """Make the received descriptors stdin, stdout, stderr and the channel (3); close all others; return the channel."""
    high = [os.dup2(descriptor, 100 + index) for index, descriptor in enumerate(received)]
    os.closerange(0, 100)
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number, inheritable=number < 3)
    os.closerange(len(high), 65536)
    return 3


def _write_files(files: dict[str, bytes]) -> None:
    for path, content in files.items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def _set_limits(limits: dict[str, Any], initial_bytes: int) -> None:
    """Set the resource limits. `initial_bytes`: memory of this process before the job, which does not count."""
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_NOFILE, 256)
    _lower_limit(resource.RLIMIT_NPROC, limits["processes"])
    _lower_limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    if limits["cpu_s"] is not None:
        # The soft limit sends SIGXCPU, by which the supervisor recognises the cause; the hard limit kills.
        _lower_limit(resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1)
    _lower_limit(resource.RLIMIT_SIGPENDING, _MAX_PENDING_SIGNALS)
    _lower_limit(resource.RLIMIT_MSGQUEUE, 0)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    max_bytes = limits["memory_bytes"]
    soft = min(stack, max_bytes) if stack != resource.RLIM_INFINITY else max_bytes
    _lower_limit(resource.RLIMIT_STACK, soft, max_bytes)
    # RLIMIT_DATA: private writable memory only, because node and others reserve gigabytes of address space.
    _lower_limit(resource.RLIMIT_DATA, initial_bytes + max_bytes)
    _lower_limit(resource.RLIMIT_AS, max_bytes + _ADDRESS_SPACE)


def _lower_limit(which: int, soft: int, hard: int | None = None) -> None:
    """Set a limit, but not above the current hard limit."""
    hard = soft if hard is None else hard
    _, current = resource.getrlimit(which)
    unlimited = current == resource.RLIM_INFINITY
    resource.setrlimit(which, (soft, hard) if unlimited else (min(soft, current), min(hard, current)))


def _exec(command: list[str]) -> int:
    """Replace this process by `command`; return the exit status of a shell if that fails."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        return 127


def _fresh_main(folder: str) -> types.ModuleType:
    """Return an empty `__main__`, as in a new interpreter. Removes the modules of this package from `sys.modules`."""
    for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.path.insert(0, folder)
    return main


def _run_script(path: str, source: bytes, main: types.ModuleType) -> int:
    """Execute a script as `python path` does; return its exit status."""
    sys.argv = [path]
    main.__dict__["__file__"] = path
    code = 1
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:  # noqa: BLE001 - the model's code may raise anything
        _print_traceback(error)
    return _finish(code)


def _finish(code: int) -> int:
    """Do what Python does at exit: join threads, run exit functions, flush streams. Return the exit status."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:  # noqa: BLE001
        _print_traceback(error)
        code = code or 1
    return code


def _exit_code(error: SystemExit) -> int:
    """Return the exit status of a SystemExit; a message goes to stderr, as in Python."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{error.code}\n")
    return 1


def _print_traceback(error: BaseException) -> None:
    """Write the traceback to stderr."""
    _write_error(_format_traceback(error))


def _format_traceback(error: BaseException) -> str:
    """Format the traceback without the frames of this module. Calls `__str__` of the error, which is user code."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_globals.get("__name__") == __name__:
        frame = frame.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frame))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - attributes of the error and handlers of signals are user code
        return f"{type(error).__name__}\n"


def _write_error(text: str) -> None:
    with contextlib.suppress(BaseException):  # `sys.stderr` and handlers of signals are user code
        sys.stderr.write(text)
        sys.stderr.flush()


# Cells may replace functions of these modules.
_select, _set_handler = select.select, signal.signal


def _serve_cells(channel: int, main: types.ModuleType) -> int:
    """Run cells until the supervisor closes the channel; report the start and the end of each with one byte.

    The supervisor sends SIGINT only to cells that have started. A signal that arrives after the end has no effect.
    """
    cells = socket.socket(fileno=channel)
    sigint_handler = _set_handler(signal.SIGINT, _ignore_signal)
    number = 0
    while True:
        _wait_for_cell(cells)
        try:
            _, (source,), _ = streams.receive(cells)
        except EOFError:
            return _finish(0)
        number += 1
        name = f"<cell {number}>"
        report, sigint_handler = _run_cell(cells, source.decode(errors="replace"), name, main.__dict__, sigint_handler)
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        cells.sendall(report)


def _wait_for_cell(cells: socket.socket) -> None:
    """Wait for the next message. A handler of a signal, such as that of a timer that a cell has set, may raise."""
    while True:
        try:
            _select([cells], [], [])
            return
        except BaseException:  # noqa: BLE001 - no cell runs that it could end
            continue


def _ignore_signal(*_: object) -> None:
    """Handler of SIGINT between cells. Unlike SIG_IGN, programs that a cell starts do not inherit it."""


def _run_cell(
    cells: socket.socket, source: str, name: str, namespace: dict[str, Any], sigint_handler: Any
) -> tuple[bytes, Any]:
    """Execute a cell with its handler of SIGINT. Returns the report and the handler for the next cell.

    The report is only one byte, because the cell's code can write to the channel, too.
    """
    report: bytes | None = None
    message = ""
    while True:
        try:
            if report is None:
                _set_handler(signal.SIGINT, sigint_handler)
                cells.sendall(STARTED)
                report, message = _execute_cell(source, name, namespace)
            following = _set_handler(signal.SIGINT, _ignore_signal)
            break
        except BaseException as interrupt:  # noqa: BLE001 - of a signal at the end of the cell, or later
            if report is None:
                report, message = ERROR, f"{type(interrupt).__name__}\n"
    _write_error(message)  # interrupts are ignored: they would cut it
    # None: not installed by Python, which cannot install it again. SIG_DFL is false.
    return report, signal.default_int_handler if following is None else following


def _execute_cell(source: str, name: str, namespace: dict[str, Any]) -> tuple[bytes, str]:
    """Execute a cell and print the value of its last expression, as the interactive prompt does; return the report and
    the traceback of the exception that ended the cell."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        tree = ast.parse(source, name)
        last = ast.Interactive([tree.body.pop()]) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        if last is not None:
            exec(compile(last, name, "single", dont_inherit=True), namespace)
    except MemoryError as error:
        return MEMORY, _format_traceback(error)
    except BaseException as error:  # noqa: BLE001 - SystemExit and an interrupt end the cell, too, not the session
        return ERROR, _format_traceback(error)
    return FINISHED, ""
