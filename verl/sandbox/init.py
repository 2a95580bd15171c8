"""Inside a run, its first process: starts one program after the other, adopts orphans, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import Any

from verl.sandbox import linux, room, wire
from verl.sandbox.cgroup import RunCgroup
from verl.sandbox.program import Confinement, prepare, wait_and_run
from verl.utils import process_tree

__all__ = ["as_process", "be_init", "kill_descendants"]


def as_process(main: Any) -> None:
    """What a fork does: never return."""
    status = 1
    try:
        status = main() or 0
    except BaseException:  # noqa: BLE001 - about to end; told to whoever reads the runner's own stderr
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def be_init(link: socket.socket, confinement: Confinement, cgroup: RunCgroup | None = None) -> int:
    """Start programs one after the other, clear up after each, and say how it ended."""
    linux.end_with_parent()
    if cgroup is not None:
        cgroup.enter()
        cgroup.close()  # no program gets its descriptors
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"1000")  # if the machine runs out of memory, this goes first
    if confinement.namespaces:
        room.own_proc()
    process_tree.adopt_orphans()
    linux.drop_capabilities(confinement.capability)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the program, which is of the same user, cannot look into this
    while True:
        try:
            child = _start_program(link, confinement)
        except OSError as error:
            wire.send(link, {"refused": str(error)})
            return 1
        code = None
        while code is None:
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
        kill_descendants()
        wire.send(link, {"code": code})
        if not link.recv(1, socket.MSG_PEEK):
            return 0


def _start_program(link: socket.socket, confinement: Confinement) -> int:
    """A process that waits, isolated, for its job; OSError, in its words, where it could not be isolated."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:

        def be_program() -> int:
            try:
                main = prepare(confinement)
            except OSError as error:
                os.write(writing, (str(error) or repr(error)).encode())
                return 1
            os.close(writing)
            return wait_and_run(link, main)

        as_process(be_program)
    os.close(writing)
    with open(reading, "rb") as pipe:
        words = pipe.read()
    if words:
        raise OSError(words.decode(errors="replace"))
    return child


def kill_descendants() -> None:
    """All that this process started or adopted, until none is left."""
    while True:
        if os.getpid() == 1:  # of a namespace: nobody else is there
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
