"""The seccomp filter of sandboxed programs, on x86-64 and arm64: refuses system calls that no program needs.

It is a deny list: programs in four languages run under it, and libraries try system calls of new kernels first.
Namespaces and Landlock separate files, network and processes; the filter removes the parts of the kernel that have most
often been used to circumvent them.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
from collections.abc import Iterable, Mapping, Sequence

from verl.sandbox.linux import (
    ARCH,
    NEW_NAMESPACES,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    check,
    prctl,
)

# System call: its numbers on x86-64 and arm64; None: does not exist there. From 424 on they are the same.
_REFUSED: Mapping[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "statmount": (457, 457), "listmount": (458, 458), "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # large and often broken parts of the kernel
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "fanotify_init": (300, 262), "vmsplice": (278, 75), "personality": (135, 92),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None),
    # memory and queues that belong to no process: no limit counts them, and they outlive the program
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180),
    # objects with kernel memory that no limit counts
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    "seccomp": (317, 277), "inotify_init": (253, None), "inotify_init1": (294, 26), "io_setup": (206, 0),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162),
    "syslog": (103, 116), "vhangup": (153, 58), "lookup_dcookie": (212, 18),
}  # fmt: skip
_BY_ARGUMENTS: Mapping[str, tuple[int | None, int | None]] = {
    "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "prctl": (157, 167), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "socketpair": (53, 199), "fcntl": (72, 25), "ioctl": (16, 29),
    "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269), "mmap": (9, 222), "close_range": (436, 436),
}  # fmt: skip
# Beginnings of the names of calls that are refused with ENOSYS, as on a kernel without them: programs have fallbacks.
_NOT_IMPLEMENTED = ("memfd", "landlock", "seccomp", "inotify", "io_setup")
# Calls that affect other processes of the same user: one process (the first argument), or all processes.
_ON_ONE_PROCESS: Mapping[str, tuple[int | None, int | None]] = {
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
_ON_MANY_PROCESSES: Mapping[str, tuple[int | None, int | None]] = {"setpriority": (141, 140), "ioprio_set": (251, 30)}
# Changes that Landlock permits on every file of the user (truncate: before ABI 3).
_MODES_AND_TIMES: Mapping[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
_OWNERS_AND_SIZES: Mapping[str, tuple[int | None, int | None]] = {
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "truncate": (76, 45),
}  # fmt: skip
# Refused in every folder: access control lists of files in memory are kernel memory that no limit counts.
_ATTRIBUTES: Mapping[str, tuple[int | None, int | None]] = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}  # fmt: skip
CALL_NUMBERS = {
    **_REFUSED, **_BY_ARGUMENTS, **_ON_ONE_PROCESS, **_ON_MANY_PROCESSES, **_MODES_AND_TIMES, **_ATTRIBUTES,
    **_OWNERS_AND_SIZES,
}  # fmt: skip
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_X32 = 0x40000000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_DATAGRAMS = 2  # this bit is set in SOCK_DGRAM and SOCK_RAW, and in neither SOCK_STREAM nor SOCK_SEQPACKET
# Commands of fcntl that make a descriptor send any signal to a process when it becomes readable.
_F_SETOWN, _F_SETOWN_EX = 8, 15
# Commands of fcntl whose memory no process is charged for: larger pipes, locks of open files, folder notifications.
_F_SETPIPE_SZ, _F_OFD_SETLK, _F_OFD_SETLKW, _F_NOTIFY = 1031, 37, 38, 1026
_SOL_SOCKET, _SO_SNDBUF, _SO_SNDBUFFORCE = 1, 7, 32
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_GROWSDOWN, _MAP_HUGETLB = 1, 0x20, 0x100, 0x40000
SHARED_MAPPING_BYTES = 4 << 20
"""Without kernel accounting: the largest anonymous mapping that processes may share."""
# A thread with its own table of descriptors: the supervisor reads one table per process.
_CLONE_FILES, _CLONE_THREAD, _CLOSE_RANGE_UNSHARE = 0x400, 0x10000, 2
_PR_FUTEX_HASH = 78  # allocates gigabytes of kernel memory
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_FS_IOC_SETFLAGS, _FS_IOC32_SETFLAGS, _FS_IOC_FSSETXATTR = 0x40086602, 0x40046602, 0x401C5820  # as chattr does

_LOAD, _AND, _EQUAL, _GREATER, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data; arguments are little-endian 64 bits
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION = struct.Struct("=HBBI")

Instruction = tuple[int, int, int, int]
"""(operation, instructions to skip if the comparison holds, and if it does not, constant): struct sock_filter."""


def install_filter(
    namespaces: bool, signal_target: int | None = None, user_files: bool = False, has_cgroup: bool = False
) -> None:
    """Install the filter of a sandboxed program."""
    _install(build_filter(namespaces, signal_target, user_files, has_cgroup))


@functools.cache
def build_filter(
    namespaces: bool, signal_target: int | None = None, user_files: bool = False, has_cgroup: bool = False
) -> bytes:
    """Assemble the filter of a sandboxed program.

    Without namespaces, and so without its own network, the program may not create sockets (except connected pairs),
    outlive its parent, hide from the supervisor, or change limits or priority of other processes.
    `signal_target`: the pid of the program if nothing else prevents signals to other processes of its user; then it may
    send signals only to itself and its group. `user_files`: the program runs as the owner of files outside its folder;
    changes of modes and times then have no effect and appear to succeed, because tools that copy files need that.
    `has_cgroup`: a cgroup counts its memory; otherwise memory that the supervisor cannot count is refused, too.
    """
    rules = [_refuse(name, errno.ENOSYS if name.startswith(_NOT_IMPLEMENTED) else errno.EPERM) for name in _REFUSED]
    rules.append(_refuse("clone3", errno.ENOSYS))  # a filter cannot read its flags; libraries fall back to clone
    rules.append(_refuse_clone())
    rules.append(_refuse_bits("close_range", _CLOSE_RANGE_UNSHARE, argument=2))
    rules += [_refuse(name, errno.EOPNOTSUPP) for name in _ATTRIBUTES]  # as on file systems without
    rules.append(_allow_values("socket", [_AF_UNIX, _AF_INET, _AF_INET6] if namespaces else []))
    fcntl_commands = [_F_SETPIPE_SZ, _F_OFD_SETLK, _F_OFD_SETLKW, _F_NOTIFY]
    rules.append(_ignore_send_buffer_size())
    prctl_options = [PR_SET_SECCOMP, _PR_FUTEX_HASH]
    if not namespaces:
        prctl_options += [PR_SET_PDEATHSIG, PR_SET_DUMPABLE]
    rules.append(_refuse_values("prctl", prctl_options))
    if not has_cgroup:
        rules.append(_refuse_uncounted_mappings())
    if not namespaces:
        # A deleted file that is in transit between two sockets appears in no folder and no process.
        rules += [_refuse("sendmsg"), _refuse("sendmmsg")]
        rules.append(_refuse_datagram_pairs())
        rules += [_allow_values(name, [0]) for name in _ON_ONE_PROCESS]
        rules += [_refuse(name) for name in _ON_MANY_PROCESSES]
        fcntl_commands += [_F_SETOWN, _F_SETOWN_EX]
        set_flags = [_FS_IOC_SETFLAGS, _FS_IOC32_SETFLAGS, _FS_IOC_FSSETXATTR] if user_files else []
        rules.append(_refuse_values("ioctl", [_FIOSETOWN, _SIOCSPGRP, *set_flags], argument=1))
    rules.append(_refuse_values("fcntl", fcntl_commands, argument=1))
    if user_files:
        rules += [_ignore(name) for name in _MODES_AND_TIMES]
        rules += [_refuse(name) for name in _OWNERS_AND_SIZES]
    if signal_target is not None:
        rules += [_allow_values("kill", [signal_target, 0, -signal_target]), _allow_values("tgkill", [signal_target])]
        rules += [_refuse(name) for name in ("tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")]
    return _assemble(rules)


def simulate_missing(features: Iterable[str]) -> None:
    """For tests: make the kernel refuse `features` (namespaces, landlock, seccomp) to this process and its children."""
    rules = []
    for feature in features:
        if feature == "namespaces":
            rules += [_refuse("unshare"), _refuse("clone3", errno.ENOSYS), _refuse_bits("clone", NEW_NAMESPACES)]
        elif feature == "landlock":
            rules.append(_refuse("landlock_create_ruleset", errno.EOPNOTSUPP))
        elif feature == "seccomp":
            rules += [_refuse("seccomp"), _refuse_values("prctl", [PR_SET_SECCOMP])]
        else:
            raise ValueError(f"unknown feature {feature!r}")
    _install(_assemble(rules))


def _refuse(name: str, code: int = errno.EPERM) -> list[Instruction]:
    """Fail with this errno."""
    return _for_call(name, [(_RETURN, 0, 0, _ERRNO | code)])


def _ignore(name: str) -> list[Instruction]:
    """Do nothing and report success."""
    return _refuse(name, 0)


def _refuse_bits(name: str, bits: int, argument: int = 0) -> list[Instruction]:
    """Refuse if the argument has any of the bits."""
    load: Instruction = (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * argument)
    return _for_call(name, [load, (_ANY_BIT, 0, 1, bits), _EPERM, _PASS])


def _refuse_clone() -> list[Instruction]:
    """Refuse new namespaces, and threads that do not share the descriptors of their process."""
    flags: Instruction = (_LOAD, 0, 0, _FIRST_ARGUMENT)
    namespaces: Instruction = (_ANY_BIT, 2, 0, NEW_NAMESPACES)
    thread: list[Instruction] = [(_AND, 0, 0, _CLONE_THREAD | _CLONE_FILES), (_EQUAL, 0, 1, _CLONE_THREAD)]
    return _for_call("clone", [flags, namespaces, *thread, _EPERM, _PASS])


def _refuse_values(name: str, values: Sequence[int], argument: int = 0) -> list[Instruction]:
    """Refuse if the argument is one of the values."""
    body: list[Instruction] = [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * argument)]
    for index, value in enumerate(values):
        body.append((_EQUAL, len(values) - index, 0, value))
    return _for_call(name, [*body, _PASS, _EPERM])


def _refuse_datagram_pairs() -> list[Instruction]:
    """Allow pairs of Unix streams only: a datagram socket can send to any socket that has an address."""
    domain: list[Instruction] = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 2, _AF_UNIX)]
    kind: list[Instruction] = [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8), (_ANY_BIT, 0, 1, _DATAGRAMS)]
    return _for_call("socketpair", [*domain, *kind, _EPERM, _PASS])


def _ignore_send_buffer_size() -> list[Instruction]:
    """SO_SNDBUF has no effect and appears to succeed: the supervisor counts every socket with the default buffer."""
    level: list[Instruction] = [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8), (_EQUAL, 0, 4, _SOL_SOCKET)]
    option: list[Instruction] = [(_LOAD, 0, 0, _FIRST_ARGUMENT + 16), (_EQUAL, 1, 0, _SO_SNDBUF)]
    done: Instruction = (_RETURN, 0, 0, _ERRNO)
    return _for_call("setsockopt", [*level, *option, (_EQUAL, 0, 1, _SO_SNDBUFFORCE), done, _PASS])


def _refuse_uncounted_mappings() -> list[Instruction]:
    """Refuse mappings that grow like a stack or have huge pages, which RLIMIT_DATA does not count, and shared anonymous
    ones above `SHARED_MAPPING_BYTES`: all their pages stay in use while one of them is mapped."""
    refused: Instruction = (_RETURN, 0, 0, _ERRNO | errno.ENOMEM)
    body: list[Instruction] = [
        (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * 3),  # flags
        (_ANY_BIT, 6, 0, _MAP_GROWSDOWN | _MAP_HUGETLB),
        (_AND, 0, 0, _MAP_SHARED | _MAP_ANONYMOUS),
        (_EQUAL, 0, 5, _MAP_SHARED | _MAP_ANONYMOUS),
        (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 + 4),  # upper half of the length
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, _FIRST_ARGUMENT + 8),
        (_GREATER, 0, 1, SHARED_MAPPING_BYTES),
    ]
    return _for_call("mmap", [*body, refused, _PASS])


def _allow_values(name: str, values: Sequence[int]) -> list[Instruction]:
    """Refuse unless the first argument is one of the values."""
    body: list[Instruction] = [(_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for index, value in enumerate(values):
        body.append((_EQUAL, len(values) - index, 0, value & 0xFFFFFFFF))
    return _for_call(name, [*body, _EPERM, _PASS])


_EPERM: Instruction = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_PASS: Instruction = (_RETURN, 0, 0, _ALLOW)


def _for_call(name: str, body: list[Instruction]) -> list[Instruction]:
    """Return instructions that execute `body` for this system call only; none if the processor lacks the call."""
    number = CALL_NUMBERS[name][ARCH]
    return [] if number is None else [(_EQUAL, 0, len(body), number), *body]


def _assemble(rules: Iterable[list[Instruction]]) -> bytes:
    """Return the filter that applies the rules in order and allows all other calls of this architecture."""
    if ARCH < 0:
        raise OSError(errno.ENOSYS, "seccomp: the system call numbers of this processor are unknown")
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[ARCH]),  # the 32-bit system calls have other numbers
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for rule in rules:
        program += rule
    program.append(_PASS)
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


def _install(program: bytes) -> None:
    code = ctypes.create_string_buffer(program)
    instructions = len(program) // _INSTRUCTION.size
    filter_program = ctypes.create_string_buffer(struct.pack("=H6xQ", instructions, ctypes.addressof(code)))
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    check(prctl(PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filter_program)), "seccomp")
