"""Inside the sandbox: the process that gives up all rights, waits for one job, and becomes the model's program."""

from __future__ import annotations

import ast
import atexit
import contextlib
import linecache
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from dataclasses import dataclass
from typing import Any

from verl.sandbox import landlock, linux, room, seccomp, wire
from verl.utils import process_tree

FINISHED, ERROR, MEMORY = b"F", b"E", b"M"
_SIGNALS = 4096  # that wait, and timers
_ADDRESS_SPACE = 64 << 30  # its page tables have 128 MB at most, unless it is used here and there


@dataclass(frozen=True, slots=True)
class Confinement:
    """What holds a program of this host, and where it lives."""

    namespaces: bool
    landlock: int
    seccomp: bool
    own_user: bool
    paths: tuple[str, ...]
    folder: str = room.WORK
    accounted: bool = False  # a cgroup counts memory and processes
    capability: int | None = None  # to read an interpreter that only root may read; Landlock says what else

    @property
    def tmp(self) -> str:
        return "/tmp" if self.namespaces else self.folder

    @property
    def among_users_files(self) -> bool:
        """It can name files that are not its own, and is their owner, or has a capability that makes it as good."""
        return not self.namespaces and (not self.own_user or self.capability is not None)

    def apply(self) -> None:
        """Of no return: this process and all it starts. Capabilities are dropped by whom it descends from."""
        os.setsid()
        linux.end_with_parent()
        if self.landlock and self.namespaces:
            landlock.restrict(["/"], ["/tmp", "/dev/shm"], room.DEVICES)
        elif self.landlock:
            landlock.restrict(self.paths, [self.folder], room.devices(self.accounted))
        if self.seccomp:
            signals_are_kept_in = self.namespaces or self.landlock >= 6
            signals_of = None if signals_are_kept_in else os.getpid()
            seccomp.refuse_dangerous(self.namespaces, signals_of, self.among_users_files, self.accounted)


def prepare(confinement: Confinement) -> types.ModuleType:
    """All that can be done before the job comes; the `__main__` of a Python program. OSError: no isolation."""
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # now: a program may not close itself to its keeper's looks
    _rehearse()  # before descriptors can no longer be sent
    confinement.apply()
    os.chdir(confinement.folder)
    os.environ.update(HOME=confinement.folder, PWD=confinement.folder, TMPDIR=confinement.tmp)
    tempfile.tempdir = None  # the runner's own, if it was asked for already
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _fresh_main(confinement.folder)


def wait_and_run(link: socket.socket, main: types.ModuleType) -> int:
    """The exit status of the one job that comes over `link`."""
    here = process_tree.data_bytes() or 64 << 20
    try:
        job, blobs, descriptors = wire.receive(link, 4)
    except EOFError:
        return 0
    channel = _take_descriptors(descriptors)
    files = dict(zip(job["files"], blobs, strict=True))
    try:
        _place(files)
    except OSError as error:
        os.write(2, f"[sandbox] a file could not be placed: {error.strerror}\n".encode())
        return 1
    _limit(job["limits"], here)
    if job["start"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python alone ignores it
        return _become(job["start"])
    if job["script"] is None:
        return _serve_cells(channel, main)
    process = os.getpid()
    code = _run_script(job["script"], files[job["script"]], main)
    if os.getpid() == process:  # not a fork that came to the end of the script
        with contextlib.suppress(OSError):
            os.write(channel, bytes([code]))
    return code


def _rehearse() -> None:
    """Do once what a job will do: the pages of memory that it writes are copied now and not then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(ours, {"start": [], "limits": {"processes": 1}}, [b""], [ours.fileno()])
        for descriptor in wire.receive(theirs, 1)[2]:
            os.close(descriptor)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        code = "import math\ndef f(x):\n    return [str(y) for y in range(x)]\nprint(f(9), math.pi, file=nowhere)"
        exec(compile(code, "rehearsal", "exec"), {"nowhere": nowhere})


def _take_descriptors(came: list[int]) -> int:
    """stdin, stdout and stderr to their numbers, the channel to the next, everything else closed."""
    high = [os.dup2(descriptor, 100 + index) for index, descriptor in enumerate(came)]
    os.closerange(0, 100)
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number, inheritable=number < 3)
    os.closerange(len(high), 65536)
    return 3


def _place(files: dict[str, bytes]) -> None:
    for path, content in files.items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def _limit(limits: dict[str, Any], here: int) -> None:
    """`here`: the memory that this process has already, which is not the program's."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, 256)
    _lower(resource.RLIMIT_NPROC, limits["processes"])
    _lower(resource.RLIMIT_FSIZE, limits["file_bytes"])
    if limits["cpu_s"] is not None:
        _lower(resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1)  # first a signal that tells why
    _lower(resource.RLIMIT_SIGPENDING, _SIGNALS)
    _lower(resource.RLIMIT_MSGQUEUE, 0)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    most = limits["memory_bytes"]
    _lower(resource.RLIMIT_STACK, min(stack, most) if stack != resource.RLIM_INFINITY else most, most)
    # Private writable memory only. Of address space, node and others reserve gigabytes.
    _lower(resource.RLIMIT_DATA, here + most)
    _lower(resource.RLIMIT_AS, most + _ADDRESS_SPACE)


def _lower(which: int, value: int, hard: int | None = None) -> None:
    _, most = resource.getrlimit(which)
    wanted = (value, value if hard is None else hard)
    resource.setrlimit(which, wanted if most == resource.RLIM_INFINITY else (min(value, most), min(wanted[1], most)))


def _become(command: list[str]) -> int:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        return 127


def _fresh_main(folder: str) -> types.ModuleType:
    """A `__main__` as a new Python has it; nothing of the runner is in its modules."""
    for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.path.insert(0, folder)
    return main


def _run_script(path: str, source: bytes, main: types.ModuleType) -> int:
    sys.argv = [path]
    main.__dict__["__file__"] = path
    code = 1
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
        code = 0
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException as error:  # noqa: BLE001 - it is the program's, and told as Python tells it
        _tell(error)
    return _wind_up(code)


def _wind_up(code: int) -> int:
    """What Python does at its end: threads are waited for, exit functions run, streams flushed."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException as error:  # noqa: BLE001
        _tell(error)
        code = code or 1
    return code


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{leaving.code}\n")
    return 1


def _tell(error: BaseException) -> None:
    """The traceback without the frames of the runner."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == __name__:
        frames = frames.tb_next
    with contextlib.suppress(OSError, ValueError, MemoryError):
        sys.stderr.write("".join(traceback.format_exception(type(error), error, frames)))
        sys.stderr.flush()


def _serve_cells(channel: int, main: types.ModuleType) -> int:
    """Run cells until the other side closes; each is answered with how it went."""
    cells = socket.socket(fileno=channel)
    number = 0
    while True:
        try:
            _, (source,), _ = wire.receive(cells)
        except EOFError:
            return _wind_up(0)
        except KeyboardInterrupt:  # came after the cell had ended
            continue
        number += 1
        cells.sendall(_run_cell(source.decode(errors="replace"), f"<cell {number}>", main.__dict__))


def _run_cell(source: str, name: str, namespace: dict[str, Any]) -> bytes:
    """Execute it, and show the value of its last expression as Python's own prompt does; one letter says how it went.

    Only a letter, since the cells' code can reach the socket, too: nothing that it may send there costs anything.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    how = FINISHED
    try:
        tree = ast.parse(source, name)
        last = ast.Interactive([tree.body.pop()]) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        if last is not None:
            exec(compile(last, name, "single", dont_inherit=True), namespace)
    except MemoryError as error:
        how = MEMORY
        _tell(error)
    except BaseException as error:  # noqa: BLE001 - also SystemExit and an interrupt end the cell, not the session
        how = ERROR
        _tell(error)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return how
