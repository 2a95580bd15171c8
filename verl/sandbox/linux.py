"""The system calls of a sandbox that Python has no name for: namespaces, mounts, capabilities, prctl."""

from __future__ import annotations

import ctypes
import os
import platform
import signal

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
"""Column of this machine in tables of system call numbers; -1: not known."""
_PIVOT_ROOT, _CAPSET = (155, 41), (126, 91)
_MOUNT_SETATTR = 442
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_LAST_CAPABILITY = 40


def check(result: int, what: str) -> int:
    """OSError with the reason where a call failed."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """As in C: -1 and errno for a failure. Integers go as longs, bytes as pointers."""
    plain = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    _libc.syscall.restype = ctypes.c_long
    return int(_libc.syscall(ctypes.c_long(number), *plain))


def prctl(option: int, *values: int) -> int:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return int(_libc.prctl(option, *padded))


def end_with_parent() -> None:
    """Have this process killed when its parent's thread ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def unshare(flags: int) -> None:
    check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    names = (source.encode(), target.encode(), kind.encode() if kind else None)
    check(_libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def protect_mount(target: str) -> None:
    """Make a mount, and those beneath it where the kernel can, read-only, without devices and set-user-id programs."""
    wanted = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    if syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(wanted), 32) == 0:
        return
    kept = os.statvfs(target).f_flag  # what the owner of the mount forbids stays forbidden, or the call fails
    flags = kept & (MS_NOEXEC | 1024 | 2048) | (MS_RELATIME if kept & 4096 else 0)
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | flags)


def pivot_here() -> None:
    """The working directory, a mount, becomes the root; the old one is gone."""
    check(syscall(_PIVOT_ROOT[ARCH], b".", b"."), "pivot_root")
    check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def map_user(inside: int, user: int, group: int) -> None:
    """After unshare(CLONE_NEWUSER): this process's user and group, under another number."""
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


def become(user: int, keep: int | None = None) -> None:
    """Give up root for good, but for one capability, if any. The process stays open to its own entries in /proc."""
    os.setgroups([])
    os.setresgid(user, user, user)
    prctl(_PR_SET_KEEPCAPS, int(keep is not None))
    os.setresuid(user, user, user)
    prctl(PR_SET_DUMPABLE, 1)
    if keep is not None:
        _set_capabilities(keep)
        check(prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, keep), "ambient capability")


def drop_capabilities(keep: int | None = None) -> None:
    """None now, and none by any program that is started; but for one that this process may have."""
    for capability in range(_LAST_CAPABILITY + 1):
        if capability != keep:
            prctl(PR_CAPBSET_DROP, capability)
    _set_capabilities(keep)
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")


def _set_capabilities(only: int | None) -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    bits = 0 if only is None else 1 << only
    data = (ctypes.c_uint32 * 6)(bits, bits, bits)  # effective, permitted, inheritable; then those above 31
    check(syscall(_CAPSET[ARCH], ctypes.byref(header), ctypes.byref(data)), "capset")
