"""Network: addresses of this machine, probes of ports, and HTTP requests with retries."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Any

_SIOCGIFADDR = 0x8915
# The first bytes of an HTTP/2 client, which all servers of Ray (gRPC) expect: the preface and empty settings.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS_FRAME = 4
_REPLY_TIMEOUT_S = 8.0
_TRIES = 5
FIRST_PAUSE_S = 0.5
_RETRIED_STATUS = (429, 502, 503, 504)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None if there is none or it is not known."""
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine on the route to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]


def own_address() -> str:
    """Return the address of this machine on the default route; the loopback address without a network."""
    try:
        return address_towards("8.8.8.8", 53)
    except OSError:
        return "127.0.0.1"


def find_foreign_service(host: str, port: int) -> str | None:
    """Describe the service at a port if it is not Ray; None: it may be Ray. OSError: nothing listens there."""
    encrypted = os.environ.get("RAY_USE_TLS", "0") not in ("", "0")
    with socket.create_connection((host, port), timeout=5) as connection:
        if encrypted:  # a TLS server waits for the client: a service that sends first is not Ray
            connection.settimeout(1.0)
            with contextlib.suppress(OSError):
                return _describe(connection.recv(512)) + _describe_process(host, port)
            return None
        connection.settimeout(_REPLY_TIMEOUT_S)
        try:
            connection.sendall(HTTP2_PREFACE)
            reply = connection.recv(512)
        except TimeoutError:
            return f"something that accepts connections and sends nothing{_describe_process(host, port)}"
        except OSError as error:
            return f"something that closes connections ({error}){_describe_process(host, port)}"
    if len(reply) >= 4 and reply[3] == _SETTINGS_FRAME:
        return None
    return _describe(reply) + _describe_process(host, port)


def accepts_connections(host: str, port: int) -> bool:
    """Return whether a TCP connection to the port succeeds."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def port_in_use(port: int) -> bool:
    """Return whether a process of this machine listens at the port, on any address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _describe(reply: bytes) -> str:
    if not reply:
        return "something that closes connections"
    lines = reply.decode("latin-1").splitlines()
    if lines[0].startswith(("HTTP/", "<!DOCTYPE", "<html")):
        server = next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("server:")), "")
        return f"an HTTP server{f' ({server})' if server else ''}"
    return f"something that sends {lines[0][:60]!r}"


def _describe_process(host: str, port: int) -> str:
    """The process that listens at a port of this machine, as far as it is visible to this user."""
    with contextlib.suppress(OSError):
        if socket.gethostbyname(host) not in {"127.0.0.1", *socket.gethostbyname_ex(socket.gethostname())[2]}:
            return ""
    inodes = {
        columns[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for columns in map(str.split, Path(table).read_text().splitlines()[1:])
        if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port  # 0A: LISTEN
    }
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(link) == f"socket:[{inode}]" for link in (process / "fd").iterdir() for inode in inodes):
                return f", process {(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""


def api_headers() -> dict[str, str]:
    """Return the authorization header with $VERL_API_KEY; no header if it is not set."""
    key = os.environ.get("VERL_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def request_json(http: Any, key: str, url: str, body: Any = None, remedy: str = "") -> Any:
    """Return the JSON of a reply; connection errors and overload are retried. A GET without `body`, else a POST.

    `http` is an `httpx.AsyncClient`, `key` the configuration key of the address. ConnectionError: all tries failed.
    ValueError: the server rejects the request.
    """
    import httpx

    failure = ""
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            reply = await http.request("GET" if body is None else "POST", url, json=body, headers=api_headers())
        except httpx.TransportError as error:
            failure = repr(error)
            continue
        if reply.status_code == 200:
            return reply.json()
        failure = f"status {reply.status_code}: {reply.text[:500]}"
        if reply.status_code not in _RETRIED_STATUS:
            raise ValueError(f"{key}: {url} rejects the request: {failure}")
    raise ConnectionError(f"{key}: {url} does not answer ({_TRIES} tries): {failure}{remedy}")
