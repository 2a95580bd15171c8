"""The first process of a sandbox: finds out what this host can isolate, then forks runs that are ready to start.

It starts from scratch, with one thread, a clean environment and nothing of the caller's memory, so forks of it tell a
program nothing. It is no process pool (`utils/process_pool`), whose workers serve many calls of one trust: here every
process is isolated before it knows its job and serves one. It ends, and all runs with it, when the caller does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from verl.sandbox import landlock, linux, room, seccomp, wire
from verl.sandbox.cgroup import CgroupParent
from verl.sandbox.init import as_process
from verl.sandbox.keeper import keep
from verl.sandbox.memory_usage import socket_bytes
from verl.sandbox.program import Confinement
from verl.utils import process_tree

_LOOK_FOR_PARENT_SECONDS = 2.0
_ENDING_SECONDS = 2.0
_FOLDERS = "verl-sandbox-"
# Numbers that no person has on a usual system, and that a container with 65,536 users has, too.
_FIRST_USER, _USERS = 61184, 4000
# What programs import most: loaded once, shared by all.
_PRELOAD = (
    "array bisect collections copy dataclasses datetime decimal enum fractions functools hashlib heapq io itertools "
    "json math operator os random re statistics string sys textwrap time traceback typing encodings.ascii "
    "encodings.latin_1"
)


def main(control_fd: int) -> None:
    """Say what can be isolated, then fork a run for every socket that comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    options, _, _ = wire.receive(control)
    parent = os.getppid()
    process_tree.adopt_orphans()
    for name in _PRELOAD.split():
        importlib.import_module(name)
    for name, source in options["modules"].items():
        sys.modules[name] = ModuleType(name)
        exec(compile(source, f"{name}.py", "exec"), sys.modules[name].__dict__)
    paths = tuple(room.readable(options["read"], options["temporary"]))
    socket_bytes()  # of the host's network namespace
    cgroups, reason = _open_cgroups(options["cgroup"])
    try:
        confinement, missing = _find_out(paths, cgroups is not None)
        header = {
            "namespaces": confinement.namespaces,
            "landlock": confinement.landlock,
            "seccomp": confinement.seccomp,
            "cgroup": cgroups.version if cgroups is not None else 0,
            "missing": [*missing, *reason, *_choose_temporary(options["temporary"], confinement)],
        }
        wire.send(control, header)
        if not options["probe"]:
            linux.prctl(linux.PR_SET_DUMPABLE, 0)
            if confinement.seccomp:
                # Built once, inherited by all.
                seccomp.filter_of(confinement.namespaces, None, confinement.among_users_files, confinement.accounted)
            _Zygote(control, parent, confinement, cgroups).serve()
    finally:
        if cgroups is not None:
            cgroups.close()


def _open_cgroups(wanted: bool) -> tuple[CgroupParent | None, list[str]]:
    """The cgroup for runs, after a process has entered a child of it and read its limits; or why there is none."""
    if not wanted:
        return None, ["no cgroup (disabled)"]
    try:
        cgroups = CgroupParent()
    except OSError as error:
        return None, [f"no cgroup for memory and processes ({error.strerror or error})"]
    problem = _try(lambda: _enter_cgroup(cgroups))
    cgroups.remove("probe")
    if problem is None:
        return cgroups, []
    cgroups.close()
    return None, [f"no cgroup for memory and processes ({problem})"]


def _enter_cgroup(cgroups: CgroupParent) -> None:
    cgroups.create("probe")
    run = cgroups.open("probe")
    run.limit(64 << 20, 8)
    run.enter()
    run.out_of_memory()


def _find_out(paths: tuple[str, ...], accounted: bool) -> tuple[Confinement, list[str]]:
    """Try everything in a process of its own; where namespaces work, this one moves into the tree of the runs."""
    missing = []
    plain = Confinement(
        namespaces=False,
        landlock=landlock.abi(),
        seccomp=False,
        own_user=False,
        paths=paths,
        accounted=accounted,
    )
    problem = _try(lambda: seccomp.refuse_dangerous(True))
    if problem is not None:
        missing.append(f"no seccomp filter ({problem})")
    if plain.landlock == 0:
        missing.append("no Landlock")
    plain = replace(plain, seccomp=problem is None)
    root = os.geteuid() == 0
    own_user = root and _try(lambda: linux.become(_FIRST_USER)) is None
    if root and not own_user:
        missing.append("root cannot become another user here, so programs run as root")
    problem = _try(lambda: _enter_all(paths, own_user, accounted))
    if problem is None:
        _enter_tree(paths, accounted)
        return replace(plain, namespaces=True, own_user=own_user or _counts_by_namespace()), missing
    missing.insert(0, f"no namespaces ({problem})")
    if own_user and _try(lambda: _enter_all_as_user(paths, accounted)) is None:
        linux.become(_FIRST_USER)  # root in a container that may not mount, where ordinary users may
        _enter_tree(paths, accounted)
        return replace(plain, namespaces=True, own_user=_counts_by_namespace()), missing[1:]
    confined = replace(plain, own_user=own_user)
    if own_user and _try(lambda: _read_python(None)) is not None:
        able = (linux.CAP_DAC_READ_SEARCH, linux.CAP_DAC_OVERRIDE) if plain.landlock and plain.seccomp else ()
        for capability in able:
            if _try(partial(_read_python, capability)) is None:
                return replace(confined, capability=capability), missing
        missing.append(f"programs cannot import from {sys.base_prefix}, which only root may read")
    return confined, missing


def _counts_by_namespace() -> bool:
    """Since Linux 5.14 the limit on processes counts those of the user's namespace, before that all of the user's."""
    major, minor = (int("".join(filter(str.isdigit, part))) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (5, 14)


def _read_python(capability: int | None) -> None:
    """Fails where an unprivileged user cannot, or not even with the capability."""
    linux.become(_FIRST_USER, capability)
    os.listdir(os.path.dirname(os.__file__))


def _try(action: Callable[[], object]) -> str | None:
    """Do something of no return in a fork; why it failed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)

        def attempt() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - told in words
                os.write(writing, (str(error) or repr(error)).encode()[:500])

        as_process(attempt)
    os.close(writing)
    with open(reading, "rb") as pipe:
        words = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return words or (f"it ended with {status}" if status else None)


def _enter_all(paths: tuple[str, ...], own_user: bool, accounted: bool) -> None:
    _enter_tree(paths, accounted)
    _enter_room(paths, _FIRST_USER if own_user else None)
    child = os.fork()
    if child == 0:
        as_process(room.own_proc)
    if os.waitpid(child, 0)[1]:
        raise OSError("no /proc of its own")


def _enter_all_as_user(paths: tuple[str, ...], accounted: bool) -> None:
    linux.become(_FIRST_USER)
    _enter_all(paths, False, accounted)


def _enter_tree(paths: tuple[str, ...], accounted: bool) -> None:
    """A mount namespace whose root holds only what programs may see; runs get theirs from it."""
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWNS | (linux.CLONE_NEWUSER if user else 0))
    if user:
        linux.map_user(user, user, group)
    room.build(paths, accounted)


def _enter_room(paths: tuple[str, ...], user: int | None) -> None:
    """All namespaces for one run; `user`: whom root becomes before."""
    if user is not None:
        linux.become(user)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # who cannot be looked into cannot write its own maps either
    owner, group = os.geteuid(), os.getegid()
    linux.unshare(linux.NEW_NAMESPACES & ~linux.CLONE_NEWCGROUP)
    linux.map_user(room.USER, owner, group)
    room.furnish(paths)
    socket.sethostname("sandbox")


class _Zygote:
    def __init__(
        self, control: socket.socket, parent: int, confinement: Confinement, cgroups: CgroupParent | None
    ) -> None:
        self._control = control
        self._parent = parent
        self._confinement = confinement
        self._next_user = random.SystemRandom().randrange(_USERS)
        self._keepers: dict[int, str | None] = {}  # with their folders
        self._cgroups = cgroups
        self._number = 0
        self._run_cgroups: dict[int, str] = {}  # by keeper
        self._old_cgroups: set[str] = set()  # to be removed when their last process has ended
        self._base = None if confinement.namespaces else _own_base()
        self._woken, waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        try:
            while os.getppid() == self._parent:
                ready, _, _ = select.select([self._control.fileno(), self._woken], [], [], _LOOK_FOR_PARENT_SECONDS)
                if self._control.fileno() in ready:
                    message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not message:
                        return
                    self._start(descriptors[0])
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap()
                if not ready:
                    self._end_stopped()
        finally:
            self._end_all()

    def _start(self, descriptor: int) -> None:
        self._next_user = (self._next_user + 1) % _USERS
        user = _FIRST_USER + self._next_user
        folder = tempfile.mkdtemp(dir=self._base) if self._base else None
        self._number += 1
        cgroup = f"run-{self._number}"
        if self._cgroups is not None:
            self._cgroups.create(cgroup)
        pid = os.fork()
        if pid == 0:
            as_process(lambda: self._be_keeper(descriptor, user, folder, cgroup))
        os.close(descriptor)
        self._keepers[pid] = folder
        self._run_cgroups[pid] = cgroup

    def _be_keeper(self, descriptor: int, user: int, folder: str | None, cgroup: str) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.end_with_parent()
        self._control.close()
        link = socket.socket(fileno=descriptor)
        confinement = self._confinement
        becomes = user if confinement.own_user and os.geteuid() == 0 else None
        try:
            accounting = self._cgroups.open(cgroup) if self._cgroups is not None else None
            if folder is None:
                _enter_room(confinement.paths, becomes)
            else:
                confinement = replace(confinement, folder=folder)
                if becomes is not None:
                    os.chown(folder, becomes, becomes)
                    linux.become(becomes, confinement.capability)
                process_tree.adopt_orphans()
            linux.end_with_parent()  # a new user forgets it
            linux.prctl(linux.PR_SET_DUMPABLE, 0)
            keep(link, confinement, accounting)
        except OSError as error:
            header: dict[str, Any] = {
                "status": "refused",
                "return_code": None,
                "seconds": 0.0,
                "compile": None,
                "files": [],
            }
            wire.send(link, header, [b"", f"this run could not be isolated: {error}".encode()])

    def _reap(self) -> None:
        """Ended runs, what they left in the file system, and what escaped from a keeper that was killed."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                folder = self._keepers.pop(pid, None)
                if folder is not None:
                    _remove(folder)
                if self._cgroups is not None and pid in self._run_cgroups:
                    self._old_cgroups.add(self._run_cgroups.pop(pid))
        if self._cgroups is not None:
            self._old_cgroups = {name for name in self._old_cgroups if not self._cgroups.remove(name)}
        for orphan in set(process_tree.children(os.getpid())) - set(self._keepers):
            process_tree.kill_tree(orphan)

    def _end_stopped(self) -> None:
        """A program that may signal its keeper could stop it, and so its clock."""
        for pid in self._keepers:
            if process_tree.why_not_running(pid) == "stopped":
                process_tree.kill_tree(pid)

    def _end_all(self) -> None:
        for pid in self._keepers:
            process_tree.kill_tree(pid)
        give_up = time.monotonic() + _ENDING_SECONDS
        while process_tree.children(os.getpid()) and time.monotonic() < give_up:
            self._reap()
            time.sleep(0.002)
        if self._base is not None:
            _remove(self._base)


def _own_base() -> str:
    """A folder for the runs' folders. Those of zygotes that were killed are removed: their lock is free."""
    parent = tempfile.gettempdir()
    for name in os.listdir(parent):
        if name.startswith(_FOLDERS):
            place = os.path.join(parent, name)
            lock = _lock(place)
            if lock is not None:
                _remove(place)
                os.close(lock)
    while True:
        base = tempfile.mkdtemp(prefix=_FOLDERS, dir=parent)
        lock = _lock(base)  # for as long as this process lives
        if lock is None:
            continue  # another zygote, which starts now, has just taken it for one left behind
        if os.path.isdir(base):
            os.fchmod(lock, 0o711)
            return base
        os.close(lock)  # the same, and it has removed it


def _choose_temporary(folder: str, confinement: Confinement) -> list[str]:
    """Put the runs' folders among the caller's temporary files (TMPDIR), unless programs of root, which have a user of
    their own, cannot enter it."""
    if not confinement.namespaces and confinement.own_user and _try(partial(_enter_folder, folder)) is not None:
        return [f"TMPDIR={folder} is closed to other users, so folders of programs are in {tempfile.gettempdir()}"]
    tempfile.tempdir = folder
    return []


def _enter_folder(folder: str) -> None:
    linux.become(_FIRST_USER)
    os.chdir(folder)


def _lock(folder: str) -> int | None:
    """None: it belongs to a living zygote, or to another user, or is no folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user's", folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(folder: str) -> None:
    """Also what a program made hard to remove: closed folders, or nested ones by the thousand."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        for command in (["chmod", "-R", "u+rwX", folder], ["rm", "-rf", folder]):
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
