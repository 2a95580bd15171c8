"""The far side of a process pool: a process that runs the initializer once and forks workers from there.

Forking makes a fresh worker in a millisecond, whatever the initializer loads, so a hanging one can be killed without
regret. Nothing of the pool's process is inherited: this one starts from scratch, with one thread. It ends, and takes
its workers and all they started with it, when the pool closes the control socket or the pool's process is gone.

Control messages are a letter and a number: `F` (fork; a socket comes along; the answer is the process id), `K` + id
(clear up after a worker that the pool killed; no answer), `E` + id (the same for one that ended by itself; the answer
is how, as in `subprocess.Popen.returncode`) and `P` + length (import the modules whose names follow; no answer).

A worker gets lists of calls (sizes of all parts, then for each call the pickled function, the pickled arguments and
their large buffers) and answers each with a frame (a letter, a length, seconds, a pickle): `R`, what was returned; `X`,
what was raised; `O`, out of memory. Before that come `I` with a name while a call imports something, which takes time
that is not its fault, `M` with the modules it has imported, which fresh workers shall have, and `G` when its memory has
grown so much that the pool should replace it.
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
from verl.utils.process_pool.errors import CannotSend
from verl.utils.resources import trim_heap

FORK, KILLED, ENDED, PRELOAD = b"F", b"K", b"E", b"P"
CALLS, RETURNED, RAISED, MEMORY, IMPORTING, MODULES, GROWN = b"C", b"R", b"X", b"O", b"I", b"M", b"G"
CONTROL = struct.Struct("!cq")
FRAME = struct.Struct("!cIf")
_LOOK_FOR_PARENT_SECONDS = 2.0
_LOOK_FOR_DYING_SECONDS = 0.02
_ENDING_SECONDS = 1.0
_TELL_SECONDS = 0.05


def main(control_fd: int) -> None:
    """Run the initializer that comes first over the control socket, say whether that worked, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool's process, which may still want results
    control = socket.socket(fileno=control_fd)
    with Connection(os.dup(control_fd)) as pipe:
        try:
            initializer, memory_limit, max_growth = pickle.loads(pipe.recv_bytes())
            if initializer is not None:
                initializer()
        except Exception:  # noqa: BLE001 - told to the pool, which raises it
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
        self._settle()
        try:
            while os.getppid() == parent:
                patience = _LOOK_FOR_DYING_SECONDS if self._dying else _LOOK_FOR_PARENT_SECONDS
                if select.select([self._control], [], [], patience)[0]:
                    message, descriptors, _, _ = socket.recv_fds(self._control, CONTROL.size, 1)
                    if not message:
                        return
                    order, number = CONTROL.unpack(message)
                    self._obey(order, number, descriptors)
                self._clear_up()
        finally:
            self._end_all()

    def _obey(self, order: bytes, number: int, descriptors: list[int]) -> None:
        if order == FORK:
            self._answer(self._fork(descriptors[0]))
        elif order == PRELOAD:
            self._preload(pickle.loads(self._control.recv(number, socket.MSG_WAITALL)))
        else:
            self._workers.remove(number)
            code = _ending(number) if order == ENDED else None
            if code is None:
                process_tree.kill_tree(number)
                self._dying.add(number)
            else:  # its group outlives it where it started others; those that left the group are orphans
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(number, signal.SIGKILL)
            if order == ENDED:
                self._answer(-signal.SIGKILL if code is None else code)

    def _answer(self, number: int) -> None:
        self._control.sendall(CONTROL.pack(b"A", number))

    def _settle(self) -> None:
        """What is here now belongs to the server for good: children to leave alone, and objects that forks share."""
        self._own = set(process_tree.children(os.getpid())) - self._workers - self._dying
        gc.collect()
        gc.freeze()

    def _preload(self, names: list[str]) -> None:
        """Import what a worker needed, for those still to be forked. What fails here, fails there."""
        for name in names:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        self._settle()

    def _clear_up(self) -> None:
        """Reap the killed; kill what they left behind, which this process adopted whatever session it is in."""
        self._dying = {pid for pid in self._dying if not os.waitpid(pid, os.WNOHANG)[0]}
        for orphan in set(process_tree.children(os.getpid())) - self._own - self._workers - self._dying:
            process_tree.kill_tree(orphan)
            self._dying.add(orphan)

    def _end_all(self) -> None:
        for pid in self._workers:
            process_tree.kill_tree(pid)
        self._dying |= self._workers
        self._workers = set()
        give_up = time.monotonic() + _ENDING_SECONDS
        while self._dying and time.monotonic() < give_up:
            self._clear_up()
            time.sleep(0.001)

    def _fork(self, descriptor: int) -> int:
        pid = os.fork()
        if pid:
            os.close(descriptor)
            self._workers.add(pid)
            return pid
        # The child never returns from here: it is a worker and nothing of the server's may run in it.
        status = 1
        try:
            self._control.close()
            process_tree.die_with_parent()
            process_tree.adopt_orphans()
            os.setpgid(0, 0)  # killed together with whatever it starts
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _limit_memory(self._memory_limit)
            _work_until_closed(socket.socket(fileno=descriptor), self._max_growth)
            status = 0
        except BaseException:  # noqa: BLE001 - a process that is about to end
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def _limit_memory(limit: int | None) -> None:
    """RLIMIT_DATA counts private writable memory only, beyond what is here already: libraries and reserved address
    space, of which numpy and others take gigabytes, are free.
    """
    here = process_tree.data_bytes()
    if limit is not None and here is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = here + limit if most == resource.RLIM_INFINITY else min(here + limit, most)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))


def _work_until_closed(link: socket.socket, max_growth: int | None) -> None:
    def let_go() -> None:
        if link.fileno() >= 0:
            os.close(link.detach())

    # What a call forks must not hold the socket, whose end is how the pool learns that this process has ended.
    os.register_at_fork(after_in_child=let_go)
    imports = _ImportWatch(link)
    sys.meta_path.insert(0, imports)
    received, at_start = link.makefile("rb"), process_tree.resident_bytes()
    with contextlib.suppress(OSError):
        while header := received.read(FRAME.size):
            calls = _read_calls(received, FRAME.unpack(header)[1])
            while calls:
                began = time.perf_counter()
                letter, content = _outcome(*calls.pop())
                seconds = time.perf_counter() - began
                grown = max_growth is not None and _has_grown(at_start, max_growth)
                link.sendall(imports.news() + (frame(GROWN, b"") if grown else b"") + frame(letter, content, seconds))


def _read_calls(received: BinaryIO, size: int) -> list[tuple[bytes, bytes, list[bytes]]]:
    """(function, arguments, buffers of the arguments) of each call, the first one last."""
    sizes = pickle.loads(received.read(size))
    return [
        (received.read(function), received.read(arguments), [received.read(buffer) for buffer in buffers])
        for function, arguments, buffers in sizes
    ][::-1]


def _has_grown(at_start: int, most: int) -> bool:
    """Whether this process holds `most` bytes more than at its start, also after free memory is returned."""
    if process_tree.resident_bytes() - at_start <= most:
        return False
    gc.collect()
    trim_heap()
    return process_tree.resident_bytes() - at_start > most


_load_function = functools.lru_cache(pickle.loads)


def _outcome(function: bytes, arguments: bytes, buffers: list[bytes]) -> tuple[bytes, bytes]:
    """How a call ended: a letter and its pickle."""
    try:
        value = _load_function(function)(*pickle.loads(arguments, buffers=buffers))
    except MemoryError as error:
        # Room to say so. The pool kills a process that does.
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return MEMORY, _pickled_error(error)
    except Exception as error:  # noqa: BLE001 - raised where the result is asked for
        return RAISED, _pickled_error(error)
    try:
        return RETURNED, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - raised where the result is asked for
        return RAISED, _pickled_error(CannotSend(f"returned what cannot be sent: {error}"))


def _pickled_error(error: Exception) -> bytes:
    text = "".join(traceback.format_exception(error)).strip()
    try:
        content = pickle.dumps((error, text))
        pickle.loads(content)
        return content
    except Exception:  # noqa: BLE001 - it is said in words instead
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))


def frame(letter: bytes, content: bytes, seconds: float = 0.0) -> bytes:
    return FRAME.pack(letter, len(content), seconds) + content


class _ImportWatch:
    """First in `sys.meta_path`, where it finds nothing and notices what is looked for."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._seen: set[str] = set()
        self._new: list[str] = []
        self._told_at = 0.0

    def find_spec(self, name: str, *_: object) -> None:
        # Once per name: a module that is missing is looked for in every call. Other threads have nothing to say here.
        if name in self._seen or threading.current_thread() is not threading.main_thread():
            return
        self._seen.add(name)
        self._new.append(name)
        if time.monotonic() - self._told_at >= _TELL_SECONDS:
            self._told_at = time.monotonic()
            self._link.sendall(frame(IMPORTING, name.encode()))

    def news(self) -> bytes:
        """A frame with what was imported since the last one; nothing if there was nothing."""
        if not self._new:
            return b""
        names, self._new = [name for name in self._new if name in sys.modules], []
        # An import may start a thread. The server, which is to do it again and forks, must not.
        return frame(MODULES, pickle.dumps(names)) if _threads() == 1 else b""


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _ending(pid: int) -> int | None:
    """How a process ended, if it does so soon."""
    give_up = time.monotonic() + _ENDING_SECONDS
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < give_up:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None
