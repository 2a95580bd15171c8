"""The far side of a scorer pool: a process that loads the reward function once and forks scorers from there.

Forking makes a fresh scorer in a millisecond, whatever the function imports, so a hanging one can be killed without
regret. Nothing of the trainer is inherited: this process starts from scratch, with one thread. It ends, and takes its
scorers and all they started with it, when the pool closes the control socket or the pool's process is gone.

Control messages are a letter and a number: `F` (fork; a socket comes along; the answer is the process id), `K` + id
(clear up after a scorer that the pool killed; no answer), `E` + id (the same for one that ended by itself; the answer
is how, as in `subprocess.Popen.returncode`) and `P` + length (import the modules whose names follow; no answer).

A scorer gets lists of pickled arguments and answers with frames (a letter, a length, seconds, a pickle): `S`, the
fields of a Score and how long it took, for one sample after the other; and `I` with names while a sample makes it
import something, which takes time that is not the sample's fault, and which the next scorers need not do again.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from verl.utils import process_tree
from verl.utils.reward_score.attempt import MEMORY, Fields, attempt, invalid

FORK, KILLED, ENDED, PRELOAD = b"F", b"K", b"E", b"P"
SCORE, IMPORTED = b"S", b"I"
CONTROL = struct.Struct("!cq")
FRAME = struct.Struct("!cIf")
_LOOK_FOR_PARENT_SECONDS = 2.0
_LOOK_FOR_DYING_SECONDS = 0.02
_ENDING_SECONDS = 1.0
_TELL_SECONDS = 0.05


def main(control_fd: int) -> None:
    """Load the function that comes first over the control socket, say whether that worked, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which may still want scores
    control = socket.socket(fileno=control_fd)
    with Connection(os.dup(control_fd)) as pipe:
        try:
            compute, memory_limit = _load(pipe.recv_bytes())
        except Exception:  # noqa: BLE001 - told to the pool, which raises it
            pipe.send(traceback.format_exc())
            return
        pipe.send(None)
    _Server(control, compute, memory_limit).serve()


def _load(payload: bytes) -> tuple[Callable[..., Any], int | None]:
    from verl.utils.reward_score import registry

    compute, users_own, memory_limit = pickle.loads(payload)
    registry.add_all(users_own)
    return compute, memory_limit


class _Server:
    def __init__(self, control: socket.socket, compute: Callable[..., Any], memory_limit: int | None) -> None:
        self._control = control
        self._compute = compute
        self._memory_limit = memory_limit
        self._scorers: set[int] = set()
        self._dying: set[int] = set()
        self._looked_for: set[str] = set()

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
            self._scorers.remove(number)
            code = _ending(number, _ENDING_SECONDS) if order == ENDED else None
            if code is None:
                process_tree.kill_family(number)
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
        self._own = set(process_tree.children(os.getpid())) - self._scorers - self._dying
        gc.collect()
        gc.freeze()

    def _preload(self, names: list[str]) -> None:
        """Import what a scorer needed while scoring, for those still to be forked. What fails here, fails there."""
        self._looked_for.update(names)
        for name in names:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        self._settle()

    def _clear_up(self) -> None:
        """Reap the killed; kill what they left behind, which this process adopted whatever session it is in."""
        self._dying = {pid for pid in self._dying if not os.waitpid(pid, os.WNOHANG)[0]}
        for orphan in set(process_tree.children(os.getpid())) - self._own - self._scorers - self._dying:
            process_tree.kill_family(orphan)
            self._dying.add(orphan)

    def _end_all(self) -> None:
        for pid in self._scorers:
            process_tree.kill_family(pid)
        self._dying |= self._scorers
        self._scorers = set()
        give_up = time.monotonic() + _ENDING_SECONDS
        while self._dying and time.monotonic() < give_up:
            self._clear_up()
            time.sleep(0.001)

    def _fork(self, descriptor: int) -> int:
        pid = os.fork()
        if pid:
            os.close(descriptor)
            self._scorers.add(pid)
            return pid
        # The child never returns from here: it is a scorer and nothing of the server's may run in it.
        status = 1
        try:
            self._control.close()
            process_tree.end_with_parent()
            process_tree.adopt_orphans()
            os.setpgid(0, 0)  # killed together with whatever it starts
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _limit_memory(self._memory_limit)
            _score_until_closed(self._compute, socket.socket(fileno=descriptor), self._looked_for)
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


def _lift_memory_limit() -> None:
    """Room to say that the memory was used up. The pool kills a scorer that says so."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _score_until_closed(compute: Callable[..., Any], link: socket.socket, looked_for: set[str]) -> None:
    me = os.getpid()
    imports = _ImportWatch(link, looked_for)
    sys.meta_path.insert(0, imports)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            for payload in pickle.loads(_receive(link)):
                began = time.perf_counter()
                fields = _attempt(compute, payload)
                seconds = time.perf_counter() - began
                if os.getpid() != me:
                    os._exit(0)  # forked by the function, and came back from it: there is one answer already
                link.sendall(imports.news() + _frame(SCORE, fields, seconds))


def _attempt(compute: Callable[..., Any], payload: bytes) -> Fields:
    try:
        fields = attempt(lambda: compute(**pickle.loads(payload)))
    except MemoryError:  # not even the error could be put into words
        fields = 0.0, {}, "MemoryError", MEMORY
    if fields[3] == MEMORY:
        _lift_memory_limit()
    return fields


def _frame(kind: bytes, content: Any, seconds: float = 0.0) -> bytes:
    try:
        body = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - becomes the sample's error
        body = pickle.dumps(invalid(f"what the reward function returned cannot be sent: {error}"))
    return FRAME.pack(kind, len(body), seconds) + body


def _receive(link: socket.socket) -> bytearray:
    """The next list, as the pool sent it: its length and its pickle."""
    _, size, _ = FRAME.unpack(_exactly(link, FRAME.size))
    return _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


class _ImportWatch:
    """First in `sys.meta_path`, where it finds nothing and notices what is looked for, other than what is `known`."""

    def __init__(self, link: socket.socket, known: set[str]) -> None:
        self._link = link
        self._known = known
        self._new: list[str] = []
        self._told_at = 0.0

    def find_spec(self, name: str, *_: object) -> None:
        # Once per name: a module that is missing is looked for in every call. Other threads have nothing to say here.
        if name in self._known or threading.current_thread() is not threading.main_thread():
            return
        self._known.add(name)
        self._new.append(name)
        if time.monotonic() - self._told_at >= _TELL_SECONDS:
            self._told_at = time.monotonic()
            self._link.sendall(self.news())

    def news(self) -> bytes:
        """A frame with what was imported since the last one, or looked for in vain; nothing if there was nothing."""
        if not self._new:
            return b""
        # An import may hang, or start a thread. The server, which is to do it again, must do neither.
        done = [name for name in self._new if _is_over(name)] if _threads() == 1 else []
        self._new = [name for name in self._new if not _is_over(name)]
        return _frame(IMPORTED, done)


def _is_over(module: str) -> bool:
    """Whether a module and all it lies in are imported, or missing."""
    parts = module.split(".")
    lines = (sys.modules.get(".".join(parts[:end])) for end in range(1, len(parts) + 1))
    return not any(getattr(getattr(each, "__spec__", None), "_initializing", False) for each in lines)


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _ending(pid: int, patience: float) -> int | None:
    """How a process ended, if it does so within `patience` seconds."""
    give_up = time.monotonic() + patience
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < give_up:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None
