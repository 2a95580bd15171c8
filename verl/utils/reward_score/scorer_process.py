"""The far side of a scorer pool: a process that loads the reward function once and forks scorers from there.

Forking makes a fresh scorer in a millisecond, whatever the function imports, so a hanging one can be killed without
regret. Nothing of the trainer is inherited: this process starts from scratch, with one thread. It ends, and takes its
scorers with it, when the pool closes the control socket or the pool's process is gone.

Control messages are `F` (fork; a socket comes along; the answer is the process id), `K` + id (kill that scorer and what
it started) and `E` + id (the same for one that has ended by itself); the answer to these is how it ended, as in
`subprocess.Popen.returncode`. A scorer gets lists of (number, arguments) and answers each with (number, fields of its
Score), one by one.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

FORK, KILL, ENDED = b"F", b"K", b"E"
NUMBER = struct.Struct("!q")
_LOOK_FOR_PARENT_SECONDS = 2.0
_TRACE_LINES = 6
_ENDING_SECONDS = 1.0


def main(control_fd: int) -> None:
    """Load the function that comes first over the control socket, say whether that worked, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which may still want scores
    control = socket.socket(fileno=control_fd)
    with Connection(os.dup(control_fd)) as pipe:
        try:
            compute = _load(pipe.recv_bytes())
        except Exception:  # noqa: BLE001 - told to the pool, which raises it
            pipe.send(traceback.format_exc())
            return
        pipe.send(None)
    _serve(control, compute)


def _serve(control: socket.socket, compute: Callable[..., Any]) -> None:
    parent = os.getppid()
    children: set[int] = set()
    dying: set[int] = set()
    try:
        while os.getppid() == parent:
            if not select.select([control], [], [], _LOOK_FOR_PARENT_SECONDS)[0]:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1 + NUMBER.size, 1)
            if not message:
                return
            if message[:1] == FORK:
                answer = _fork(compute, descriptors[0], control)
                children.add(answer)
            else:
                pid = NUMBER.unpack(message[1:])[0]
                code = _kill(pid, _ENDING_SECONDS if message[:1] == ENDED else 0.0)
                children.remove(pid)
                if code is None:
                    dying.add(pid)
                answer = -signal.SIGKILL if code is None else code
            control.sendall(NUMBER.pack(answer))
            dying = {pid for pid in dying if not os.waitpid(pid, os.WNOHANG)[0]}
    finally:
        for pid in children:
            _kill(pid, 0.0)


def normalised(result: Any) -> tuple[float, dict[str, Any], str | None]:
    """(value, extra fields, what is wrong or None) of what a reward function returned: a number, or a dict of them."""
    extra = dict(result) if isinstance(result, Mapping) else {}
    if isinstance(result, Mapping) and "score" not in result:
        return 0.0, {}, f"the reward function returned a dict without 'score' (it has: {', '.join(map(str, result))})"
    number = result["score"] if isinstance(result, Mapping) else result
    try:
        value = float(number)
    except (TypeError, ValueError):
        return 0.0, {}, f"the reward function returned a {type(number).__name__}, not a number: {str(number)[:80]!r}"
    if not math.isfinite(value):
        return 0.0, {}, f"the reward function returned {value}"
    return value, extra, None


def attempt(compute: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[float, dict[str, Any], str | None]:
    """Score one sample; whatever the function raises becomes the sample's error."""
    try:
        return normalised(compute(**arguments))
    except Exception:  # noqa: BLE001 - counted and shown by the reward manager
        return 0.0, {}, "".join(traceback.format_exc().splitlines(keepends=True)[-_TRACE_LINES:]).strip()


def _load(payload: bytes) -> Callable[..., Any]:
    from verl.utils.reward_score import registry

    compute, users_own = pickle.loads(payload)
    registry.add_all(users_own)
    return compute


def _fork(compute: Callable[..., Any], descriptor: int, control: socket.socket) -> int:
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    # The child never returns from here: it is a scorer and nothing of the server's may run in it.
    status = 1
    try:
        control.close()
        os.setpgid(0, 0)  # killed together with whatever it starts
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _score_until_closed(compute, Connection(descriptor))
        status = 0
    except BaseException:  # noqa: BLE001 - a process that is about to end
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _score_until_closed(compute: Callable[..., Any], pipe: Connection) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            for number, arguments in pipe.recv():
                score = attempt(compute, arguments)
                try:
                    message = pickle.dumps((number, score))
                except Exception as error:  # noqa: BLE001 - becomes the sample's error
                    what = f"what the reward function returned cannot be sent: {error}"
                    message = pickle.dumps((number, (0.0, {}, what)))
                pipe.send_bytes(message)


def _kill(pid: int, patience: float) -> int | None:
    """Kill a scorer and its process group. How it ended, if it had by itself within `patience`; else None: it is not
    waited for, since dying takes a while on a busy machine, and must be reaped later.
    """
    give_up = time.monotonic() + patience
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < give_up:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    # The group outlives its first process where that started others.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if ended:
        return os.waitstatus_to_exitcode(status)
    os.kill(pid, signal.SIGKILL)
    return None
