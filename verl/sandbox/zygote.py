"""The zygote: the process of a sandbox that probes what this host can isolate, then forks the runs.

It is a new interpreter with one thread, a clean environment and nothing of the caller's memory, so that programs in its
forks can read no data of the caller. Unlike workers of a process pool (`utils/process_pool`), every fork is isolated
before it receives its job, and serves only one. The zygote and all runs end when the caller ends.
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

from verl.sandbox import filesystem, linux, seccomp, streams
from verl.sandbox.cgroup import CgroupParent
from verl.sandbox.program import Confinement, run_and_exit
from verl.sandbox.supervisor import supervise
from verl.sandbox.usage import socket_bytes
from verl.utils import process_tree

# Time between two checks for the end of the caller and for stopped supervisors.
CHECK_INTERVAL_S = 2.0
_CLEAN_UP_TIMEOUT_S = 2.0
_FOLDER_PREFIX = "verl-sandbox-"
# User ids that are unused on usual systems and exist in containers with 65,536 users.
_FIRST_USER, _USERS = 61184, 4000
# Modules that programs import most: loaded once, shared by all runs.
_PRELOAD = (
    "array bisect collections copy dataclasses datetime decimal enum fractions functools hashlib heapq io itertools "
    "json math operator os random re statistics string sys textwrap time traceback typing encodings.ascii "
    "encodings.latin_1"
)


def main(control_fd: int) -> None:
    """Report what can be isolated, then fork a run for every socket that arrives over the control socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    options, _, _ = streams.receive(control)
    parent = os.getppid()
    process_tree.adopt_orphans()
    for name in _PRELOAD.split():
        importlib.import_module(name)
    for name, source in options["modules"].items():
        sys.modules[name] = ModuleType(name)
        exec(compile(source, f"{name}.py", "exec"), sys.modules[name].__dict__)
    paths = tuple(filesystem.readable_paths(options["read"], options["temporary"]))
    socket_bytes()  # reads /proc and caches the result: runs have another network namespace
    cgroups, reason = _open_cgroups(options["cgroup"])
    try:
        confinement, missing = _probe_isolation(paths, cgroups is not None)
        if cgroups is not None and confinement.can_leave_cgroup:
            cgroups.close()
            cgroups = None
            reason = ["no cgroup (programs run as its owner, and neither namespaces nor Landlock hide it)"]
            confinement = replace(confinement, has_cgroup=False)
        header = {
            "namespaces": confinement.namespaces,
            "landlock": confinement.landlock,
            "seccomp": confinement.seccomp,
            "cgroup": cgroups.version if cgroups is not None else 0,
            "missing": [*missing, *reason, *_choose_temporary(options["temporary"], confinement)],
        }
        streams.send(control, header)
        if not options["probe"]:
            linux.prctl(linux.PR_SET_DUMPABLE, 0)
            if confinement.seccomp:
                # Cached here, inherited by all runs.
                seccomp.build_filter(
                    confinement.namespaces, None, confinement.can_access_user_files, confinement.has_cgroup
                )
            _Zygote(control, parent, confinement, cgroups).serve()
    finally:
        if cgroups is not None:
            cgroups.close()


def _open_cgroups(enabled: bool) -> tuple[CgroupParent | None, list[str]]:
    """Return the cgroup for runs, verified by a process that enters a child of it; or None and the reasons."""
    if not enabled:
        return None, ["no cgroup (disabled)"]
    try:
        cgroups = CgroupParent()
    except OSError as error:
        return None, [f"no cgroup for memory and processes ({error.strerror or error})"]
    problem = _try_in_fork(lambda: _enter_cgroup(cgroups))
    cgroups.remove("probe")
    if problem is None:
        return cgroups, []
    cgroups.close()
    return None, [f"no cgroup for memory and processes ({problem})"]


def _enter_cgroup(cgroups: CgroupParent) -> None:
    """Enter a cgroup as a run does; OSError if that is not possible."""
    cgroups.create("probe")
    run = cgroups.open("probe")
    run.limit(64 << 20, 8)
    run.enter()
    run.out_of_memory()


def _probe_isolation(paths: tuple[str, ...], has_cgroup: bool) -> tuple[Confinement, list[str]]:
    """Try every kernel feature in a fork; return what runs can use and a description of each missing feature.

    If namespaces work, this process enters the new root of the runs. `has_cgroup`: a cgroup counts memory and
    processes.
    """
    missing = []
    plain = Confinement(
        namespaces=False,
        landlock=linux.landlock_abi(),
        seccomp=False,
        own_user=False,
        paths=paths,
        has_cgroup=has_cgroup,
    )
    seccomp_problem = _try_in_fork(lambda: seccomp.install_filter(True))
    if seccomp_problem is not None:
        missing.append(f"no seccomp filter ({seccomp_problem})")
    if plain.landlock == 0:
        missing.append("no Landlock")
    plain = replace(plain, seccomp=seccomp_problem is None)
    is_root = os.geteuid() == 0
    own_user = is_root and _try_in_fork(lambda: linux.become_user(_FIRST_USER)) is None
    if is_root and not own_user:
        missing.append("root cannot become another user here, so programs run as root")
    namespace_problem = _try_in_fork(lambda: _enter_all(paths, own_user, has_cgroup))
    if namespace_problem is None:
        _enter_root(paths, has_cgroup)
        return replace(plain, namespaces=True, own_user=own_user), missing
    if own_user and _try_in_fork(lambda: _enter_all_as_user(paths, has_cgroup)) is None:
        # In some containers root may not mount, but another user may in a new user namespace.
        linux.become_user(_FIRST_USER)
        _enter_root(paths, has_cgroup)
        return replace(plain, namespaces=True), missing
    missing.insert(0, f"no namespaces ({namespace_problem})")
    confined = replace(plain, own_user=own_user)
    if own_user and _try_in_fork(lambda: _read_python(None)) is not None:
        # A capability to read all files is given only where Landlock and seccomp limit it.
        candidates = (linux.CAP_DAC_READ_SEARCH, linux.CAP_DAC_OVERRIDE) if plain.landlock and plain.seccomp else ()
        for capability in candidates:
            if _try_in_fork(partial(_read_python, capability)) is None:
                return replace(confined, capability=capability), missing
        missing.append(f"programs cannot import from {sys.base_prefix}, which only root may read")
    return confined, missing


def _read_python(capability: int | None) -> None:
    """Raise OSError if an unprivileged user, with the capability, cannot read this Python."""
    linux.become_user(_FIRST_USER, capability)
    os.listdir(os.path.dirname(os.__file__))


def _try_in_fork(action: Callable[[], object]) -> str | None:
    """Execute an irreversible action in a fork; return why it failed, None if it did not."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)

        def attempt() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - its message is reported
                os.write(writing, (str(error) or repr(error)).encode()[:500])

        run_and_exit(attempt)
    os.close(writing)
    with open(reading, "rb") as pipe:
        problem = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return problem or (f"the fork ended with exit code {os.waitstatus_to_exitcode(status)}" if status else None)


def _enter_all(paths: tuple[str, ...], own_user: bool, has_cgroup: bool) -> None:
    """Enter the root and the namespaces as a run does; OSError if that is not possible."""
    _enter_root(paths, has_cgroup)
    _enter_namespaces(paths, _FIRST_USER if own_user else None)
    child = os.fork()
    if child == 0:
        run_and_exit(filesystem.mount_proc)
    if os.waitpid(child, 0)[1]:
        raise OSError("no /proc of its own")


def _enter_all_as_user(paths: tuple[str, ...], has_cgroup: bool) -> None:
    linux.become_user(_FIRST_USER)
    _enter_all(paths, False, has_cgroup)


def _enter_root(paths: tuple[str, ...], has_cgroup: bool) -> None:
    """Enter a mount namespace whose root contains only what programs may see; runs copy it."""
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWNS | (linux.CLONE_NEWUSER if user else 0))
    if user:
        linux.map_user(user, user, group)
    filesystem.enter_new_root(paths, has_cgroup)


def _enter_namespaces(paths: tuple[str, ...], user: int | None) -> None:
    """Enter the namespaces of one run. `user`: the user id to change to first, if this process is root."""
    if user is not None:
        linux.become_user(user)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # a process that is not dumpable cannot write its own uid_map
    owner, group = os.geteuid(), os.getegid()
    linux.unshare(linux.NEW_NAMESPACES & ~linux.CLONE_NEWCGROUP)
    linux.map_user(filesystem.USER, owner, group)
    filesystem.mount_private_folders(paths)
    socket.sethostname("sandbox")


class _Zygote:
    """Forks a supervisor per run and cleans up after it."""

    def __init__(
        self, control: socket.socket, parent: int, confinement: Confinement, cgroups: CgroupParent | None
    ) -> None:
        self._control = control
        self._parent = parent
        self._confinement = confinement
        self._next_user = random.SystemRandom().randrange(_USERS)
        self._supervisors: dict[int, str | None] = {}
        """Folder of the run (None with namespaces), by pid of its supervisor."""
        self._cgroups = cgroups
        self._num_runs = 0
        self._run_cgroups: dict[int, str] = {}
        """Name of the run's cgroup, by pid of its supervisor."""
        self._old_cgroups: set[str] = set()
        """Cgroups of ended runs that still have processes and cannot be removed yet."""
        self._base = None if confinement.namespaces else _create_base_folder()
        self._child_ended, wakeup = os.pipe()  # readable after SIGCHLD
        os.set_blocking(self._child_ended, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Fork runs until the caller closes the control socket or ends; then end all runs."""
        next_check = time.monotonic() + CHECK_INTERVAL_S
        try:
            while os.getppid() == self._parent:
                timeout = max(0.0, next_check - time.monotonic())
                ready, _, _ = select.select([self._control.fileno(), self._child_ended], [], [], timeout)
                if self._control.fileno() in ready:
                    message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not message:
                        return
                    self._start(descriptors[0])
                if self._child_ended in ready:
                    os.read(self._child_ended, 4096)
                    self._reap()
                if time.monotonic() >= next_check:
                    self._kill_stopped()
                    next_check = time.monotonic() + CHECK_INTERVAL_S
        finally:
            self._kill_all()

    def _start(self, descriptor: int) -> None:
        """Fork the supervisor of a run. `descriptor`: the run's socket."""
        self._next_user = (self._next_user + 1) % _USERS
        user = _FIRST_USER + self._next_user
        folder = tempfile.mkdtemp(dir=self._base) if self._base else None
        self._num_runs += 1
        cgroup = f"run-{self._num_runs}"
        if self._cgroups is not None:
            self._cgroups.create(cgroup)
        pid = os.fork()
        if pid == 0:
            run_and_exit(lambda: self._run_supervisor(descriptor, user, folder, cgroup))
        os.close(descriptor)
        self._supervisors[pid] = folder
        self._run_cgroups[pid] = cgroup

    def _run_supervisor(self, descriptor: int, user: int, folder: str | None, cgroup: str) -> None:
        """Isolate this fork and supervise a run; if that fails, send the result `refused`."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.die_with_parent()
        self._control.close()
        link = socket.socket(fileno=descriptor)
        confinement = self._confinement
        new_user = user if confinement.own_user else None
        try:
            run_cgroup = self._cgroups.open(cgroup) if self._cgroups is not None else None
            if folder is None:
                _enter_namespaces(confinement.paths, new_user)
            else:
                confinement = replace(confinement, folder=folder)
                if new_user is not None:
                    os.chown(folder, new_user, new_user)
                    linux.become_user(new_user, confinement.capability)
                process_tree.adopt_orphans()
            linux.die_with_parent()  # again: a change of user resets it
            linux.prctl(linux.PR_SET_DUMPABLE, 0)
            supervise(link, confinement, run_cgroup)
        except OSError as error:
            header: dict[str, Any] = {
                "status": "refused",
                "return_code": None,
                "seconds": 0.0,
                "compile": None,
                "files": [],
            }
            with contextlib.suppress(ConnectionError):  # no client to report to
                streams.send(link, header, [b"", f"this run could not be isolated: {error}".encode()])

    def _reap(self) -> None:
        """Clean up after runs that ended: their folder, cgroup, and processes whose supervisor was killed."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                folder = self._supervisors.pop(pid, None)
                if folder is not None:
                    remove_folder(folder)
                if self._cgroups is not None and pid in self._run_cgroups:
                    self._old_cgroups.add(self._run_cgroups.pop(pid))
        if self._cgroups is not None:
            self._old_cgroups = {name for name in self._old_cgroups if not self._cgroups.remove(name)}
        for orphan in set(process_tree.children(os.getpid())) - set(self._supervisors):
            process_tree.kill_tree(orphan)

    def _kill_stopped(self) -> None:
        """Kill runs whose supervisor is stopped: a program that can send it SIGSTOP would have no time limit."""
        for pid in self._supervisors:
            if process_tree.why_not_running(pid) == "stopped":
                process_tree.kill_tree(pid)

    def _kill_all(self) -> None:
        """Kill all runs and remove their folders and cgroups."""
        for pid in self._supervisors:
            process_tree.kill_tree(pid)
        deadline = time.monotonic() + _CLEAN_UP_TIMEOUT_S
        while process_tree.children(os.getpid()) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)
        if self._base is not None:
            remove_folder(self._base)


def _create_base_folder() -> str:
    """Create the folder for the runs' folders. Remove those of killed zygotes, whose lock is free."""
    parent = tempfile.gettempdir()
    for name in os.listdir(parent):
        if name.startswith(_FOLDER_PREFIX):
            stale = os.path.join(parent, name)
            lock = _lock(stale)
            if lock is not None:
                remove_folder(stale)
                os.close(lock)
    while True:
        base = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent)
        lock = _lock(base)  # held as long as this process lives
        if lock is None:
            continue  # another zygote, which starts now, holds it to remove it as stale
        if os.path.isdir(base):
            os.fchmod(lock, 0o711)
            return base
        os.close(lock)  # another zygote has removed it already


def _choose_temporary(folder: str, confinement: Confinement) -> list[str]:
    """Use the caller's TMPDIR for the runs' folders, unless the users of the runs cannot enter it.

    Returns a description of that problem, if there is one.
    """
    if not confinement.namespaces and confinement.own_user and _try_in_fork(partial(_enter_folder, folder)) is not None:
        return [f"TMPDIR={folder} is closed to other users, so folders of programs are in {tempfile.gettempdir()}"]
    tempfile.tempdir = folder
    return []


def _enter_folder(folder: str) -> None:
    linux.become_user(_FIRST_USER)
    os.chdir(folder)


def _lock(folder: str) -> int | None:
    """Return a descriptor that holds the lock of a folder; None if a living zygote or another user owns it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the folder belongs to another user", folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_folder(folder: str) -> None:
    """Remove a folder, also if it contains unreadable or very deeply nested folders."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        for command in (["chmod", "-R", "u+rwX", folder], ["rm", "-rf", folder]):
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
