"""The fork server of a process pool: it runs the initializer once and forks workers; also the code of the workers.

Forking creates a worker in a millisecond, whatever the initializer loads, so killing a hanging one is cheap. The server
is a new process with one thread; it inherits nothing from the pool's process. It ends, with its workers and all their
child processes, when the pool closes the control socket or the pool's process has ended.

Control messages are one byte and a number: `F` (fork; a socket is attached; the reply is the process id), `K` + id
(reap a worker that the pool killed; no reply), `E` + id (reap a worker that ended by itself; the reply is its exit code
as in `subprocess.Popen.returncode`) and `P` + length (import the modules whose names follow; no reply).

A worker receives lists of calls (sizes of all parts, then for each call the pickled function, the pickled arguments and
their large buffers) and sends a frame for each result (kind, length, seconds, pickle): `R` returned, `X` raised, `O`
out of memory. Other frames: `I` with the name of a module while a call imports it, because that time does not count;
`M` with the modules that were imported, which new workers should have; `G` if the worker's memory has grown so much
that the pool should replace it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import BinaryIO

from verl.utils import process_tree
from verl.utils.resources import trim_heap

FORK, KILLED, ENDED, PRELOAD = b"F", b"K", b"E", b"P"
CALLS, RETURNED, RAISED, MEMORY, IMPORTING, MODULES, GROWN = b"C", b"R", b"X", b"O", b"I", b"M", b"G"
CONTROL = struct.Struct("!cq")
FRAME = struct.Struct("!cIf")
_PARENT_CHECK_SECONDS = 2.0
_REAP_SECONDS = 0.02
_EXIT_SECONDS = 1.0
_IMPORT_REPORT_SECONDS = 0.05


def main(control_fd: int) -> None:
    """Receive the initializer over the control socket, run it, report its success or traceback, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool's process handles Ctrl-C; it may still need results
    control = socket.socket(fileno=control_fd)
    with Connection(os.dup(control_fd)) as pipe:
        try:
            initializer, memory_limit, max_growth = pickle.loads(pipe.recv_bytes())
            if initializer is not None:
                initializer()
        except Exception:  # noqa: BLE001 - sent to the pool, which raises it
            pipe.send(traceback.format_exc())
            return
        pipe.send(None)
    _Server(control, memory_limit, max_growth).serve()


class _Server:
    def __init__(self, control: socket.socket, memory_limit: int | None, max_growth: int | None) -> None:
        self._control = control
        self._memory_limit, self._max_growth = memory_limit, max_growth
        self._workers: set[int] = set()
        self._dying: set[int] = set()

    def serve(self) -> None:
        parent = os.getppid()
        process_tree.adopt_orphans()
        self._freeze_state()
        try:
            while os.getppid() == parent:
                timeout = _REAP_SECONDS if self._dying else _PARENT_CHECK_SECONDS
                if select.select([self._control], [], [], timeout)[0]:
                    message, descriptors, _, _ = socket.recv_fds(self._control, CONTROL.size, 1)
                    if not message:
                        return
                    order, number = CONTROL.unpack(message)
                    self._handle(order, number, descriptors)
                self._reap()
        finally:
            self._kill_all()

    def _handle(self, order: bytes, number: int, descriptors: list[int]) -> None:
        if order == FORK:
            self._reply(self._fork(descriptors[0]))
        elif order == PRELOAD:
            self._preload(pickle.loads(self._control.recv(number, socket.MSG_WAITALL)))
        else:
            self._workers.remove(number)
            code = _exit_code(number) if order == ENDED else None
            if code is None:
                process_tree.kill_tree(number)
                self._dying.add(number)
            else:  # its child processes may still run: in its group, or as orphans
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(number, signal.SIGKILL)
            if order == ENDED:
                self._reply(-signal.SIGKILL if code is None else code)

    def _reply(self, number: int) -> None:
        self._control.sendall(CONTROL.pack(b"A", number))

    def _freeze_state(self) -> None:
        """Exclude current children from reaping, and current objects from garbage collection: forks share them."""
        self._own = set(process_tree.children(os.getpid())) - self._workers - self._dying
        gc.collect()
        gc.freeze()

    def _preload(self, names: list[str]) -> None:
        """Import modules for future workers. A failed import is ignored: it fails again in the call that needs it."""
        for name in names:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        self._freeze_state()

    def _reap(self) -> None:
        """Reap killed workers, and kill their orphans, which this process has adopted, also those in other sessions."""
        self._dying = {pid for pid in self._dying if not os.waitpid(pid, os.WNOHANG)[0]}
        for orphan in set(process_tree.children(os.getpid())) - self._own - self._workers - self._dying:
            process_tree.kill_tree(orphan)
            self._dying.add(orphan)

    def _kill_all(self) -> None:
        for pid in self._workers:
            process_tree.kill_tree(pid)
        self._dying |= self._workers
        self._workers = set()
        deadline = time.monotonic() + _EXIT_SECONDS
        while self._dying and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.001)

    def _fork(self, descriptor: int) -> int:
        pid = os.fork()
        if pid:
            os.close(descriptor)
            self._workers.add(pid)
            return pid
        # The child is a worker and never returns from here: none of the server's code may run in it.
        status = 1
        try:
            self._control.close()
            process_tree.die_with_parent()
            process_tree.adopt_orphans()
            os.setpgid(0, 0)  # killed together with its child processes
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _limit_memory(self._memory_limit)
            _worker_loop(socket.socket(fileno=descriptor), self._max_growth)
            status = 0
        except BaseException:  # noqa: BLE001 - a process that is about to end
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def _limit_memory(limit: int | None) -> None:
    """Limit the private writable memory (RLIMIT_DATA) to `limit` bytes more than now.

    Libraries and reserved address space, which is gigabytes for numpy and others, do not count.
    """
    current = process_tree.data_bytes()
    if limit is not None and current is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        new = current + limit if hard == resource.RLIM_INFINITY else min(current + limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (new, hard))


def _worker_loop(link: socket.socket, max_growth: int | None) -> None:
    def close_link() -> None:
        if link.fileno() >= 0:
            os.close(link.detach())

    # Forked children must not hold the socket: its end tells the pool that this process has ended.
    os.register_at_fork(after_in_child=close_link)
    imports = _ImportRecorder(link)
    sys.meta_path.insert(0, imports)
    received, at_start = link.makefile("rb"), process_tree.resident_bytes()
    with contextlib.suppress(OSError):
        while header := received.read(FRAME.size):
            calls = _read_calls(received, FRAME.unpack(header)[1])
            while calls:
                began = time.perf_counter()
                kind, content = _run_call(*calls.pop())
                seconds = time.perf_counter() - began
                grown = max_growth is not None and _has_grown(at_start, max_growth)
                link.sendall(
                    imports.imported_frame() + (frame(GROWN, b"") if grown else b"") + frame(kind, content, seconds)
                )


def _read_calls(received: BinaryIO, size: int) -> list[tuple[bytes, bytes, list[bytes]]]:
    """(function, arguments, buffers of the arguments) of each call, the first one last."""
    sizes = pickle.loads(received.read(size))
    return [
        (received.read(function), received.read(arguments), [received.read(buffer) for buffer in buffers])
        for function, arguments, buffers in sizes
    ][::-1]


def _has_grown(at_start: int, max_growth: int) -> bool:
    """Whether this process holds over `max_growth` bytes more than at its start, also after free memory is returned."""
    if process_tree.resident_bytes() - at_start <= max_growth:
        return False
    gc.collect()
    trim_heap()
    return process_tree.resident_bytes() - at_start > max_growth


_load_function = functools.lru_cache(pickle.loads)


def _run_call(function: bytes, arguments: bytes, buffers: list[bytes]) -> tuple[bytes, bytes]:
    """Run a call; return the kind of its result and the pickled value or error."""
    try:
        value = _load_function(function)(*pickle.loads(arguments, buffers=buffers))
    except MemoryError as error:
        # Allow the memory for this report. The pool then kills the process.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        return MEMORY, _pickled_error(error)
    except Exception as error:  # noqa: BLE001 - raised by the future
        return RAISED, _pickled_error(error)
    try:
        return RETURNED, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - raised by the future
        return RAISED, _pickled_error(CannotSend(f"returned a value that cannot be pickled: {error}"))


def _pickled_error(error: Exception) -> bytes:
    text = "".join(traceback.format_exception(error)).strip()
    try:
        content = pickle.dumps((error, text))
        pickle.loads(content)
        return content
    except Exception:  # noqa: BLE001 - replaced by its text
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))


def frame(kind: bytes, content: bytes, seconds: float = 0.0) -> bytes:
    return FRAME.pack(kind, len(content), seconds) + content


class _ImportRecorder:
    """Import hook that finds no module but reports the names that are imported; first in `sys.meta_path`."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._seen: set[str] = set()
        self._new: list[str] = []
        self._reported_at = 0.0

    def find_spec(self, name: str, *_: object) -> None:
        # Once per name: a missing module is searched in every call. Imports of other threads are not the call's.
        if name in self._seen or threading.current_thread() is not threading.main_thread():
            return
        self._seen.add(name)
        self._new.append(name)
        if time.monotonic() - self._reported_at >= _IMPORT_REPORT_SECONDS:
            self._reported_at = time.monotonic()
            self._link.sendall(frame(IMPORTING, name.encode()))

    def imported_frame(self) -> bytes:
        """A frame with the modules that were imported since the last one; empty if there are none."""
        if not self._new:
            return b""
        names, self._new = [name for name in self._new if name in sys.modules], []
        # The server would import them too. An import that starts threads is not repeated there: the server forks.
        return frame(MODULES, pickle.dumps(names)) if _thread_count() == 1 else b""


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _exit_code(pid: int) -> int | None:
    """Exit code of a process; None if it does not end within a second."""
    deadline = time.monotonic() + _EXIT_SECONDS
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


# ---------------------------------------------------------------- errors


class TaskTimeout(TimeoutError):
    """The call exceeded its time limit; its process and all child processes were killed."""


class ProcessDied(RuntimeError):
    """The process of the call ended: by exit, by a signal, or by a crash. As of the errors above and below, the message
    is the predicate of a sentence whose subject is the call."""

    def __init__(self, process_end: str, external: bool = False) -> None:
        super().__init__(process_end, external)
        self.process_end = process_end
        """The predicate of a sentence whose subject is the process: "was killed by SIGKILL"."""
        self.external = external
        """Whether the cause usually comes from outside: several processes were killed or stopped during the call."""

    def __str__(self) -> str:
        return f"lost its process, which {self.process_end}"


class CannotSend(ValueError):
    """Arguments, a result or an initializer cannot be pickled, or cannot be unpickled by the receiver."""


class InitializerError(ValueError):
    """The initializer failed in the new process; the message is its traceback."""


class PoolClosed(RuntimeError):
    """The pool was closed, or lost its fork server, before the call finished."""
