"""Landlock: the files, TCP ports and processes that this process, and all it starts, may still reach."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from verl.sandbox.linux import PR_SET_NO_NEW_PRIVS, check, prctl, syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
# The last right on files that each ABI knows.
_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_BIND_AND_CONNECT_TCP = 3  # ABI 4
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3  # ABI 6


def abi() -> int:
    """0: the kernel has none, or this process may not use it."""
    return max(0, syscall(_CREATE, None, 0, _ASK_VERSION))


def restrict(read: Iterable[str], write: Iterable[str], devices: Iterable[str]) -> None:
    """From here on: `read` (and run programs), `write` (all but devices), and nothing else; no TCP, no signals out."""
    version = abi()
    handled = (1 << _BITS[min(version, 5)]) - 1
    network = _BIND_AND_CONNECT_TCP if version >= 4 else 0
    scope = _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("=QQQ", handled, network, scope)[:size]
    rules = check(syscall(_CREATE, attributes, size, 0), "landlock_create_ruleset")
    try:
        for rights, paths in (
            (_READ, read),
            (handled & ~_IOCTL_DEVICE, write),
            (_READ_FILE | _WRITE_FILE, devices),
        ):
            for path in paths:
                _allow(rules, path, rights & handled)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        check(syscall(_RESTRICT, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # what is not there, or not for this user, need not be allowed
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place), 12)
        check(syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, ctypes.byref(rule), 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)
