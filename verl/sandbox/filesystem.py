"""The file system that a program sees: its own root with the installed programs read-only.

Without namespaces a program has a plain folder and Landlock; then only `readable_paths` and `devices` are used.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
from collections.abc import Iterable, Sequence

from verl.sandbox import linux

USER = 1000  # id of the program's user inside its namespace
WORK = "/tmp/work"
# Folders of installed programs and libraries.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
# Files that loaders and libraries read at start.
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
DEFAULT_FILE_MB = 64
MAX_FILES = 16384  # in /tmp and /dev/shm of a run; each takes a kilobyte of kernel memory
_GENERATED_FILES = {
    "/etc/passwd": f"sandbox:x:{USER}:{USER}::{WORK}:/bin/sh\n",
    "/etc/group": f"sandbox:x:{USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def readable_paths(extra: Iterable[str], temporary: str) -> list[str]:
    """Return the paths that every program may read and execute: the system's programs, this Python with its packages,
    and `extra`. `temporary`: the folder of all runs, of which a program may see only its own part."""
    tools = [os.path.realpath(path) for name in ("node", "g++", "bash") if (path := shutil.which(name))]
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()]
    python += [os.path.realpath(path) for path in python]  # an environment may be a symlink
    python.append(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    candidates = [*_SYSTEM, *_SETTINGS, *python, *(os.path.dirname(os.path.dirname(tool)) for tool in tools), *extra]
    # Never whole home or temporary folders, even if an interpreter is installed directly in one of them.
    excluded = {"/", os.path.expanduser("~"), "/root", "/home", "/tmp", os.path.abspath(temporary)}
    paths = [path for path in dict.fromkeys(map(os.path.abspath, candidates)) if os.path.lexists(path)]
    paths = [path for path in paths if path not in excluded]
    # Without paths inside others: both could not be mounted.
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def devices(has_cgroup: bool) -> tuple[str, ...]:
    """Return the device files of a program. `has_cgroup`: whether a cgroup counts its memory.

    Without a cgroup, /dev/zero is left out: a mapping of it is shared memory that is not counted.
    """
    return DEVICES if has_cgroup else tuple(path for path in DEVICES if path != _ZERO)


def enter_new_root(paths: Sequence[str], has_cgroup: bool) -> None:
    """Move this process, which has its own mount namespace, into a read-only root with `paths`, devices and /proc."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    # Opened before the new root is mounted over /tmp, where a Python environment may be.
    opened = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in (*paths, *devices(has_cgroup), "/proc")}
    if not has_cgroup:
        opened[_ZERO] = os.open("/dev/full", os.O_PATH)  # reads as zeros, too, and cannot be mapped
    links = {path: os.readlink(path) for path in opened if os.path.islink(path)}
    folders = {path for path in opened if os.path.isdir(path)}
    linux.mount("sandbox", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=4m")
    os.chdir("/tmp")
    for path, descriptor in opened.items():
        target = path[1:]
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        if path in links:
            os.symlink(links[path], target)
        else:
            if path in folders:
                os.makedirs(target, exist_ok=True)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
            linux.mount(f"/proc/self/fd/{descriptor}", target, None, linux.MS_BIND | linux.MS_REC)
            if path not in DEVICES and path != "/proc":  # devices stay writable; /proc is mounted again by the init
                linux.protect_mount(target)
        os.close(descriptor)
    for folder in ("tmp", "dev/shm", "etc"):
        os.makedirs(folder, exist_ok=True)
    for path, text in _GENERATED_FILES.items():
        with open(path[1:], "w", encoding="utf-8") as file:
            file.write(text)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"dev/{name}")
    os.symlink("/proc/self/fd", "dev/fd")
    linux.pivot_root()
    linux.mount("none", "/", None, linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV, "size=4m")


def mount_private_folders(paths: Sequence[str]) -> None:
    """Mount a new /tmp and /dev/shm, in memory, for one run: in its mount namespace, after `enter_new_root`.

    Those of `paths` that are in /tmp are mounted again in the new one.
    """
    hidden = {path: os.open(path, os.O_PATH) for path in paths if path.startswith("/tmp/")}
    linux.mount("sandbox", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _tmpfs_options(DEFAULT_FILE_MB))
    os.mkdir("/tmp/.shm", 0o700)  # one file system for both folders, so that they share one size limit
    os.mkdir(WORK, 0o700)
    linux.mount("/tmp/.shm", "/dev/shm", None, linux.MS_BIND)
    for path, descriptor in hidden.items():
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        linux.mount(f"/proc/self/fd/{descriptor}", path, None, linux.MS_BIND | linux.MS_REC)
        os.close(descriptor)


def resize_private_folders(file_mb: int) -> None:
    """Set the total size of the files in /tmp and /dev/shm of a run."""
    linux.mount("sandbox", "/tmp", None, linux.MS_REMOUNT | linux.MS_NOSUID | linux.MS_NODEV, _tmpfs_options(file_mb))


def mount_proc() -> None:
    """Mount /proc with the processes of this namespace; an empty folder if the host does not allow that."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC | linux.MS_RDONLY
    try:
        linux.mount("proc", "/proc", "proc", flags)
    except OSError:
        linux.mount("none", "/proc", "tmpfs", flags, "size=4k")


def _tmpfs_options(file_mb: int) -> str:
    return f"mode=1777,size={file_mb}m,nr_inodes={MAX_FILES}"
