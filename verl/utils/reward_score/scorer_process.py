"""The far side of a scorer pool: a process that loads the reward function once and forks scorers from there.

Forking makes a fresh scorer in a millisecond, whatever the function imports, so a hanging one can be killed without
regret. Nothing of the trainer is inherited: this process starts from scratch, with one thread. It ends, and takes its
scorers with it, when the pool closes the control socket or the pool's process is gone.

Control messages are `F` (fork; a socket comes along; the answer is the process id) and `K` + id (kill and reap that
scorer and what it started; the answer is how it ended, as in `subprocess.Popen.returncode`). A scorer gets lists of
(number, arguments) and answers each with (number, Score fields), one by one.
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
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

FORK, KILL = b"F", b"K"
NUMBER = struct.Struct("!q")
_LOOK_FOR_PARENT_SECONDS = 2.0
_TRACE_LINES = 6


def main(control_fd: int) -> None:
    """Load the function that comes first over the control socket, say whether that worked, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which may still want scores
    control = socket.socket(fileno=control_fd)
    parent = os.getppid()
    with Connection(os.dup(control_fd)) as pipe:
        try:
            compute = _load(pipe.recv_bytes())
        except Exception:  # noqa: BLE001 - told to the pool, which raises it
            pipe.send(traceback.format_exc())
            return
        pipe.send(None)
    children: set[int] = set()
    try:
        while select.select([control], [], [], _LOOK_FOR_PARENT_SECONDS)[0] or os.getppid() == parent:
            if not select.select([control], [], [], 0)[0]:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1 + NUMBER.size, 1)
            if not message:
                return
            if message[:1] == FORK:
                answer = _fork(compute, descriptors[0], control)
                children.add(answer)
            else:
                pid = NUMBER.unpack(message[1:])[0]
                answer = _reap(pid)
                children.discard(pid)
            control.sendall(NUMBER.pack(answer))
    finally:
        for pid in children:
            _reap(pid)


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


def _reap(pid: int) -> int:
    """Kill a scorer and its process group; how it ended, had it already ended by itself."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    # Before the child's own setpgid the group does not exist; after its end others of the group may go on.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
