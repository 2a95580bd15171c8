"""What this machine's network says: the interface of an address, what listens at a port, and who answers there."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
# How a client of HTTP/2 begins, which all of Ray's servers speak (gRPC): a preface, and settings without any entry.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS_FRAME = 4
_PATIENCE_S = 8.0


def interface_of(address: str) -> str | None:
    """Name of the interface that has this IPv4 address; None where there is none, or the system does not say."""
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # nothing is sent
        return probe.getsockname()[0]


def own_address() -> str:
    """By which other machines reach this one, as far as one can tell: where the default route begins."""
    try:
        return address_towards("8.8.8.8", 53)
    except OSError:  # no network at all
        return "127.0.0.1"


def stranger_at(host: str, port: int) -> str | None:
    """What answers at a port in Ray's place, in words; None if it may be Ray. OSError where nobody answers at all."""
    encrypted = os.environ.get("RAY_USE_TLS", "0") not in ("", "0")
    with socket.create_connection((host, port), timeout=5) as connection:
        if encrypted:  # it waits for us to speak, in a way that is not ours; who speaks first is a stranger
            connection.settimeout(1.0)
            with contextlib.suppress(OSError):
                return _described(connection.recv(512)) + _holder(host, port)
            return None
        connection.settimeout(_PATIENCE_S)
        try:
            connection.sendall(HELLO)
            reply = connection.recv(512)
        except TimeoutError:
            return f"something that accepts connections and says nothing{_holder(host, port)}"
        except OSError as error:
            return f"something that closes connections ({error}){_holder(host, port)}"
    if len(reply) >= 4 and reply[3] == _SETTINGS_FRAME:
        return None
    return _described(reply) + _holder(host, port)


def answers(host: str, port: int) -> bool:
    """Whether anybody accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def is_taken(port: int) -> bool:
    """Whether a process of this machine listens at the port already, on any of its addresses."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _described(reply: bytes) -> str:
    if not reply:
        return "something that closes connections"
    lines = reply.decode("latin-1").splitlines()
    if lines[0].startswith(("HTTP/", "<!DOCTYPE", "<html")):
        server = next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("server:")), "")
        return f"an HTTP server{f' ({server})' if server else ''}"
    return f"something that says {lines[0][:60]!r}"


def _holder(host: str, port: int) -> str:
    """The process behind a port of this machine, as far as we may see it."""
    with contextlib.suppress(OSError):
        if socket.gethostbyname(host) not in {"127.0.0.1", *socket.gethostbyname_ex(socket.gethostname())[2]}:
            return ""
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for fields in map(str.split, Path(table).read_text().splitlines()[1:])
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port  # 0A: it listens
    }
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(link) == f"socket:[{inode}]" for link in (process / "fd").iterdir() for inode in inodes):
                return f", process {(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""
