"""Hosts with less isolation: the kernel features that are disabled for the attacks, by column of the tables."""

from __future__ import annotations

import os
import subprocess
import sys

from verl.sandbox import linux, seccomp

NOBODY = 65534
# Column: the features that the host lacks.
ISOLATION_LEVELS = {
    "all": "",
    "Landlock + seccomp": "namespaces",
    "namespaces": "landlock,seccomp",
    "Landlock": "namespaces,seccomp",
    "seccomp": "namespaces,landlock",
    "none": "namespaces,landlock,seccomp",
}
# The same for the limits on memory and disk. "cgroup": the sandbox is created with cgroup=False.
RESOURCE_LEVELS = {
    "all + cgroup": "",
    "all": "cgroup",
    "Landlock + seccomp + cgroup": "namespaces",
    "Landlock + seccomp": "namespaces,cgroup",
    "namespaces": "landlock,seccomp,cgroup",
    "Landlock": "namespaces,seccomp,cgroup",
    "none": "namespaces,landlock,seccomp,cgroup",
}


def restrict(without: str, user: int | None) -> None:
    """Irreversibly restrict this process: run as `user`, and disable some of namespaces, landlock and seccomp."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
        os.chdir("/")
    if features := [feature for feature in without.split(",") if feature not in ("", "cgroup")]:
        seccomp.simulate_missing(features)


def python_for(user: int | None) -> str | None:
    """This interpreter, or that of the system if `user` cannot read this one; None if `user` can read neither."""
    if user is None:
        return sys.executable
    probe = "import os, sys; os.setuid(int(sys.argv[1])); os.listdir(os.path.dirname(os.__file__))"
    for path in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([path, "-c", probe, str(user)], capture_output=True, check=False).returncode == 0:
            return path
    return None
