"""Isolate a candidate process from the driver and the checker: their memory, descriptors and later tests.

All processes run as the same user. Either of two kernel features separates them: the driver and the checker are not
dumpable, and the candidate is in a Landlock domain, from which it can neither trace nor (from ABI 6 on) signal
processes outside. `can_read` verifies the result. Standard library only: this file also runs inside the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import time
from collections.abc import Iterable
from typing import Any

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_LANDLOCK_VERSION = 1
# A Landlock domain must remove at least one right: this one, which candidates do not have anyway.
_MAKE_BLOCK_DEVICE = 1 << 11
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_KILL_TIMEOUT_S = 5.0
_MAX_DESCRIPTORS = 1 << 16
_PROBE = b"probe of the checker's memory"


def _libc() -> Any:
    try:
        import ctypes

        return ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):  # without ctypes nothing is isolated, which `can_read` detects
        return None


def protect() -> None:
    """Make this process and its forks unreadable for processes of the same user; adopt orphans of the candidates."""
    libc = _libc()
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def confine(seconds: float) -> None:
    """Called in the candidate's process before its solution: lead a process group (see `kill_all`), limit the
    processor time to about twice `seconds`, and enter a Landlock domain."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # In some sandboxes programs cannot kill each other: there, this limit ends the candidate instead of `kill_all`.
    limit = int(2 * seconds) + 2
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    libc = _libc()
    if libc is None:
        return
    import ctypes

    def syscall(*values: Any) -> int:
        return int(libc.syscall(*(ctypes.c_long(value) if isinstance(value, int) else value for value in values)))

    version = syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    if version > 0:
        size = 8 if version < 4 else 16 if version < 6 else 24
        attributes = struct.pack("=QQQ", _MAKE_BLOCK_DEVICE, 0, _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)[:size]
        rules = syscall(_LANDLOCK_CREATE, attributes, size, 0)
        if rules >= 0:
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            syscall(_LANDLOCK_RESTRICT, rules, 0)
            os.close(rules)
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # undoes `protect`: the sandbox must be able to read its memory use


def can_read(pids: Iterable[int]) -> bool:
    """Return whether this process can read the memory of one of `pids`, its parent or another fork of its parent."""
    return any(_opens_memory(pid) or _copies_memory(pid) for pid in pids)


def _opens_memory(pid: int) -> bool:
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
    except OSError:
        return False
    return True


def _copies_memory(pid: int) -> bool:
    libc = _libc()
    if libc is None or not hasattr(libc, "process_vm_readv"):
        return False
    import ctypes

    source = ctypes.c_char_p(_PROBE)  # has the same address in the parent and in its other forks
    target = ctypes.create_string_buffer(len(_PROBE))
    address = ctypes.cast(source, ctypes.c_void_p).value or 0
    local = struct.pack("=QQ", ctypes.addressof(target), len(_PROBE))
    remote = struct.pack("=QQ", address, len(_PROBE))
    return int(libc.process_vm_readv(pid, local, ctypes.c_ulong(1), remote, ctypes.c_ulong(1), ctypes.c_ulong(0))) > 0


def keep_descriptors(kept: Iterable[int]) -> None:
    """Close all descriptors except `kept`; 0, 1 and 2 become the null device if they are not kept."""
    kept = sorted(set(kept))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        if standard not in kept:
            os.dup2(null, standard)
    limit = os.sysconf("SC_OPEN_MAX")
    end = min(limit, _MAX_DESCRIPTORS) if limit >= 0 else _MAX_DESCRIPTORS  # -1: there is no limit
    first = 3
    for descriptor in [*(number for number in kept if number > 2), end]:
        os.closerange(first, min(descriptor, end))
        first = descriptor + 1


def kill_all(pids: Iterable[int], spared: Iterable[int] = ()) -> None:
    """Kill the children `pids`, the processes they started, and all other children except `spared`; wait for them.

    Processes that survive their parent become children of this process (`protect`): they are killed in the next round.
    """
    targets = set(pids)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while targets and time.monotonic() < deadline:
        for pid in targets:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        ended = [_kill_and_reap(pid) for pid in targets]  # a list: all of them, also after one that cannot be killed
        if not all(ended):
            return
        targets = _children() - set(spared)


def _kill_and_reap(pid: int) -> bool:
    """Kill a child and wait for it; return False if the sandbox does not permit killing it."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:
            return os.waitpid(pid, os.WNOHANG)[0] != 0
        os.waitpid(pid, 0)
    return True


def _children() -> set[int]:
    """Return the children of this process, including adopted ones; empty if /proc is not available."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()
