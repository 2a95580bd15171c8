"""Where a program lives: a tree of its own with the installed programs read-only, or a bare folder behind Landlock."""

from __future__ import annotations

import os
import shutil
import site
import sys
from collections.abc import Iterable, Sequence

from verl.sandbox import linux

USER = 1000  # what a program's user is called inside
WORK = "/tmp/work"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_SETTINGS = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/ssl/openssl.cnf",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ZERO = "/dev/zero"
FILE_MB = 64
MOST_FILES = 16384  # most files in the private directories; each costs the kernel a kilobyte
_OWN_SETTINGS = {
    "/etc/passwd": f"sandbox:x:{USER}:{USER}::{WORK}:/bin/sh\n",
    "/etc/group": f"sandbox:x:{USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def readable(extra: Iterable[str], temporary: str) -> list[str]:
    """What every program may read and run: the system's programs, this Python with its packages, and `extra`."""
    tools = [os.path.realpath(path) for name in ("node", "g++", "bash") if (path := shutil.which(name))]
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()]
    python += [os.path.realpath(path) for path in python]  # an environment may be a link to another folder
    python.append(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    wanted = [*_SYSTEM, *_SETTINGS, *python, *(os.path.dirname(os.path.dirname(tool)) for tool in tools), *extra]
    # An interpreter in the root, in a home directory or among temporary files itself would open all of it.
    closed = {"/", os.path.expanduser("~"), "/root", "/home", "/tmp", os.path.abspath(temporary)}
    found: list[str] = []
    for path in map(os.path.abspath, wanted):
        covered = any(path == other or path.startswith(other + "/") for other in found)
        if os.path.lexists(path) and path not in closed and not covered:
            found.append(path)
    return found


def devices(accounted: bool) -> tuple[str, ...]:
    """Without kernel accounting there is no /dev/zero: mapped, it is shared memory that cannot be counted."""
    return DEVICES if accounted else tuple(path for path in DEVICES if path != _ZERO)


def build(paths: Sequence[str], accounted: bool) -> None:
    """Move this process, which has a mount namespace of its own, into a new root with nothing but `paths` in it."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    # Held before the new tree covers /tmp, where an environment may well be.
    held = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in (*paths, *devices(accounted), "/proc")}
    if not accounted:
        held[_ZERO] = os.open("/dev/full", os.O_PATH)  # reads the same and cannot be mapped
    links = {path: os.readlink(path) for path in held if os.path.islink(path)}
    folders = {path for path in held if os.path.isdir(path)}
    linux.mount("sandbox", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=4m")
    os.chdir("/tmp")
    for path, descriptor in held.items():
        place = path[1:]
        os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
        if path in links:
            os.symlink(links[path], place)
        else:
            if path in folders:
                os.makedirs(place, exist_ok=True)
            else:
                os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
            linux.mount(f"/proc/self/fd/{descriptor}", place, None, linux.MS_BIND | linux.MS_REC)
            if path not in DEVICES and path != "/proc":
                linux.protect_mount(place)
        os.close(descriptor)
    for folder in ("tmp", "dev/shm", "etc"):
        os.makedirs(folder, exist_ok=True)
    for path, text in _OWN_SETTINGS.items():
        with open(path[1:], "w", encoding="utf-8") as file:
            file.write(text)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"dev/{name}")
    os.symlink("/proc/self/fd", "dev/fd")
    linux.pivot_here()
    linux.mount("none", "/", None, linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV, "size=4m")


def furnish(paths: Sequence[str]) -> None:
    """A fresh /tmp and /dev/shm, in memory, for this run only. Needs a mount namespace of its own, inside `build`."""
    covered = {path: os.open(path, os.O_PATH) for path in paths if path.startswith("/tmp/")}
    linux.mount("sandbox", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _size(FILE_MB))
    os.mkdir("/tmp/.shm", 0o700)
    os.mkdir(WORK, 0o700)
    linux.mount("/tmp/.shm", "/dev/shm", None, linux.MS_BIND)
    for path, descriptor in covered.items():
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        linux.mount(f"/proc/self/fd/{descriptor}", path, None, linux.MS_BIND | linux.MS_REC)
        os.close(descriptor)


def resize(file_mb: int) -> None:
    linux.mount("sandbox", "/tmp", None, linux.MS_REMOUNT | linux.MS_NOSUID | linux.MS_NODEV, _size(file_mb))


def own_proc() -> None:
    """/proc with the processes of this namespace; where the host does not allow it, none at all."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC | linux.MS_RDONLY
    try:
        linux.mount("proc", "/proc", "proc", flags)
    except OSError:
        linux.mount("none", "/proc", "tmpfs", flags, "size=4k")


def _size(file_mb: int) -> str:
    return f"mode=1777,size={file_mb}m,nr_inodes={MOST_FILES}"
