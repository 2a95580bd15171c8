"""Linux system calls that Python does not provide: namespaces, mounts, capabilities, prctl, Landlock."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x20000000, 0x40000000, 0x2000000
NEW_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWCGROUP
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MS_RELATIME = 16384, 1 << 18, 1 << 21
_MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_NO_NEW_PRIVS = 38
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2

ARCH = {"x86_64": 0, "aarch64": 1, "arm64": 1}.get(platform.machine(), -1)
"""Column of this machine in tables of system call numbers; -1: unknown."""
_PIVOT_ROOT, _CAPSET = (155, 41), (126, 91)
_MOUNT_SETATTR = 442
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_LAST_CAPABILITY = 40

_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
# The number of rights on files in each ABI.
_LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_BIND_AND_CONNECT_TCP = 3  # ABI 4
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3  # ABI 6


def check(result: int, call: str) -> int:
    """Return the result of a call; raise OSError with errno if it failed."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Call a system call by its number; return -1 and set errno on failure. Integers are passed as longs, bytes as
    pointers."""
    plain = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    _libc.syscall.restype = ctypes.c_long
    return int(_libc.syscall(ctypes.c_long(number), *plain))


def prctl(option: int, *values: int) -> int:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return int(_libc.prctl(option, *padded))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def unshare(flags: int) -> None:
    check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    names = (source.encode(), target.encode(), kind.encode() if kind else None)
    check(_libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def protect_mount(target: str) -> None:
    """Make a mount (and those below it, if the kernel can) read-only, without devices and set-user-id programs."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    if syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(attributes), 32) == 0:
        return
    current = os.statvfs(target).f_flag  # to be kept: the call fails if it drops a restriction of the mount's owner
    flags = current & (MS_NOEXEC | 1024 | 2048) | (MS_RELATIME if current & 4096 else 0)
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | flags)


def pivot_root() -> None:
    """Make the working directory, which is a mount, the root, and unmount the old root."""
    check(syscall(_PIVOT_ROOT[ARCH], b".", b"."), "pivot_root")
    check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def map_user(inside: int, user: int, group: int) -> None:
    """After unshare(CLONE_NEWUSER): map this process's user and group to the id `inside` in the namespace."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {user} 1"),
        ("gid_map", f"{inside} {group} 1"),
    ):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def counts_processes_by_namespace() -> bool:
    """Return whether RLIMIT_NPROC counts only the user's processes in the same user namespace, as since Linux 5.14."""
    major, minor = (int("".join(filter(str.isdigit, part))) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (5, 14)


def become_user(user: int, keep: int | None = None) -> None:
    """Become an unprivileged user permanently, with at most one capability (`keep`).

    The process can still read its own entries in /proc.
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    prctl(_PR_SET_KEEPCAPS, int(keep is not None))
    os.setresuid(user, user, user)
    prctl(PR_SET_DUMPABLE, 1)
    if keep is not None:
        _set_capabilities(keep)
        check(prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, keep), "ambient capability")


def drop_capabilities(keep: int | None = None) -> None:
    """Drop all capabilities but `keep`, also for programs that this process starts."""
    for capability in range(_LAST_CAPABILITY + 1):
        if capability != keep:
            prctl(PR_CAPBSET_DROP, capability)
    _set_capabilities(keep)
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")


def _set_capabilities(only: int | None) -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    bits = 0 if only is None else 1 << only
    data = (ctypes.c_uint32 * 6)(bits, bits, bits)  # effective, permitted, inheritable; then capabilities above 31
    check(syscall(_CAPSET[ARCH], ctypes.byref(header), ctypes.byref(data)), "capset")


def landlock_abi() -> int:
    """The ABI version of Landlock; 0 if the kernel lacks it or this process may not use it."""
    return max(0, syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION))


def landlock_restrict(read: Iterable[str], write: Iterable[str], devices: Iterable[str]) -> None:
    """Restrict this process, and all that it starts, permanently: to reading and executing `read`, writing `write`,
    and `devices`; without TCP, and without signals or abstract sockets to processes outside."""
    version = landlock_abi()
    handled = (1 << _LANDLOCK_RIGHTS[min(version, 5)]) - 1
    network = _BIND_AND_CONNECT_TCP if version >= 4 else 0
    scope = _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("=QQQ", handled, network, scope)[:size]
    rules = check(syscall(_LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    try:
        for rights, paths in (
            (_READ, read),
            (handled & ~_IOCTL_DEVICE, write),
            (_READ_FILE | _WRITE_FILE, devices),
        ):
            for path in paths:
                _allow(rules, path, rights & handled)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        check(syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # missing, or unreadable for this user anyway
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        check(
            syscall(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_PATH_BENEATH, ctypes.byref(rule), 0),
            f"landlock_add_rule {path}",
        )
    finally:
        os.close(descriptor)
