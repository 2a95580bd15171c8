"""The HTTP side of the server, in a process of its own: signals, and clients that take more than their share."""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from verl.utils.http_server.server import bind_socket

# /slow answers after a second, /endless streams without end, /block keeps the event loop busy, /echo reads the body.
PROGRAM = """
import asyncio, logging, socket, sys, time
from verl.utils.http_server.server import ConnectionLimits, create_server

async def app(scope, receive, send):
    path = scope["path"]
    if path == "/block":
        began = time.monotonic()
        while time.monotonic() < began + 60:
            pass
    elif path == "/slow":
        await asyncio.sleep(1)
    elif path.startswith("/large/"):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        return await send({"type": "http.response.body", "body": b"x" * int(path.removeprefix("/large/"))})
    elif path == "/echo":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while path == "/endless":
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": b"done"})

logging.basicConfig(level="INFO", stream=sys.stdout)
bound = socket.socket()
bound.bind(("127.0.0.1", 0))
limits = ConnectionLimits(
    connections=int(sys.argv[1]), protected_seconds=0.1, idle_seconds=1, request_seconds=1, stalled_seconds=1,
    grace_seconds=20,
)
asyncio.run(create_server(app, "a test", limits, "/v1").serve([bound]))
"""


@pytest.fixture
def connections():
    return 3


@pytest.fixture
def files():
    return "ulimit -Sn 40"


@pytest.fixture
def server(connections, files):
    """(process, port)"""
    process = subprocess.Popen(
        # A limit on open files below the number of connections, as many systems have it.
        ["bash", "-c", f'{files}; exec "{sys.executable}" -c "$0" {connections}', PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    found = None
    while found is None:
        line = process.stdout.readline().decode()
        assert line, "it ended"
        found = re.search(r"serving a test at http://127\.0\.0\.1:(\d+)/v1", line)
    yield process, int(found[1])
    process.kill()
    process.wait()
    process.stdout.close()


def connection(port, data=b""):
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    made.sendall(data)
    return made


def response_to(port, data):
    with connection(port, data) as client:
        return client.recv(2**16)


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def seconds_until_closed(client):
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while client.recv(2**20):
            pass
    return time.monotonic() - began


def test_the_first_signal_lets_requests_finish_and_accepts_nobody_any_more(server):
    process, port = server
    client = connection(port, get("/slow"))
    idle = connection(port)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    answer = http.client.HTTPResponse(client)
    answer.begin()
    assert answer.read() == b"done"
    assert idle.recv(1) == b""
    assert process.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        connection(port)
    assert b"Traceback" not in process.stdout.read()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/endless", "/block"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_it_at_once_whatever_it_is_doing(server, path, number):
    process, port = server
    with connection(port, get(path)):
        time.sleep(0.3)
        process.send_signal(number)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=5) == -number, "it would have 20 s more"


def test_a_new_connection_replaces_the_one_that_waited_longest_for_a_request(server):
    _, port = server
    busy = connection(port, get("/slow"))
    half_open = [connection(port), connection(port, b"GET /slow HT")]
    time.sleep(0.3)
    with connection(port, get("/")) as new:
        assert b"200 OK" in new.recv(2**16)
        assert half_open[0].recv(1) == b""
        assert half_open[1].send(b"T") == 1
    assert b"200 OK" in busy.recv(2**16)


@pytest.mark.parametrize("connections", [32])
def test_requests_that_arrive_together_replace_incomplete_ones_not_each_other(server):
    process, port = server
    incomplete = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    with contextlib.ExitStack() as opened:
        for _ in range(32):
            opened.enter_context(connection(port, incomplete))
        with connection(port, get("/")) as client:  # all of them have been read
            assert b"200 OK" in client.recv(2**16)
        process.send_signal(signal.SIGSTOP)
        clients = [opened.enter_context(connection(port, get("/"))) for _ in range(16)]
        process.send_signal(signal.SIGCONT)
        assert all(b"200 OK" in client.recv(2**16) for client in clients)


@pytest.mark.parametrize("files", ["ulimit -Sn 96; ulimit -Hn 96"])
@pytest.mark.parametrize("connections", [1000])
def test_connections_do_not_use_up_a_low_limit_on_open_files(server):
    process, port = server
    with contextlib.ExitStack() as opened:
        for data in (b"", b"POST /"):
            for _ in range(300):
                opened.enter_context(connection(port, data))
            assert psutil.Process(process.pid).num_fds() <= 84, "some are left for the files of the server"
            while b"503" in response_to(port, get("/")):  # while the connections above are read
                time.sleep(0.1)
            assert b"200 OK" in response_to(port, get("/"))


def test_connections_above_the_limit_get_503_if_all_others_have_requests(server):
    _, port = server
    busy = [connection(port, get("/slow")) for _ in range(3)]
    time.sleep(0.1)
    with connection(port, get("/")) as refused:
        assert refused.recv(2**16).startswith(b"HTTP/1.1 503 ")
        assert seconds_until_closed(refused) < 5
    assert [b"200 OK" in client.recv(2**16) for client in busy] == [True] * 3
    with connection(port, get("/")) as later:
        assert b"200 OK" in later.recv(2**16)


def test_many_slow_connections_do_not_keep_others_out(server):
    _, port = server
    with contextlib.ExitStack() as opened:
        for _ in range(60):
            opened.enter_context(connection(port, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"))
        for _ in range(10):
            with connection(port, get("/")) as client:
                assert b"200 OK" in client.recv(2**16)


@pytest.mark.parametrize("connections", [1000])
def test_health_does_not_wait_behind_a_flood_of_connections(server):
    """The server is stopped while 300 requests arrive, and then /health: it is answered before most of them."""
    process, port = server
    with contextlib.ExitStack() as opened:
        opened.enter_context(connection(port, get("/"))).recv(2**16)
        process.send_signal(signal.SIGSTOP)
        flood = [opened.enter_context(connection(port, get("/"))) for _ in range(300)]
        health = opened.enter_context(connection(port, get("/health")))
        process.send_signal(signal.SIGCONT)
        assert b"200 OK" in health.recv(2**16)
        answered = sum(bool(select.select([client], [], [], 0)[0]) for client in flood)
        assert answered < 200
        assert all(b"200 OK" in client.recv(2**16) for client in flood)


@pytest.mark.parametrize("connections", [100])
def test_as_many_connections_as_allowed_can_be_open(server):
    _, port = server
    with contextlib.ExitStack() as opened:
        for _ in range(60):
            opened.enter_context(connection(port))
        assert b"200 OK" in opened.enter_context(connection(port, get("/"))).recv(2**16)


@pytest.mark.parametrize("header", [b"x: " + b"y" * 20_000, b"x: y\r\n" * 4_000 + b"x: y", b"x: " + b"y" * 1_000_000])
def test_large_headers_are_rejected_in_one_piece_and_in_several(server, header):
    _, port = server
    with connection(port, b"GET / HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n") as client:
        assert client.recv(2**16).startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost:",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome",  # answered before it was sent
    ],
)
def test_a_request_that_does_not_come_is_not_waited_for(server, data):
    _, port = server
    client = connection(port, data)
    # Now and then a byte does not help.
    for _ in range(4):
        time.sleep(0.2)
        with contextlib.suppress(ConnectionError):
            client.sendall(data and b"x")
    assert seconds_until_closed(client) < 3


@pytest.mark.slow
def test_a_connection_may_be_used_again_and_not_be_kept_for_nothing(server):
    _, port = server
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for path in ("/", "/slow"):
        client.request("GET", path)
        assert client.getresponse().read() == b"done"
        time.sleep(0.6)  # for the first time within the second that it may be idle
    assert seconds_until_closed(client.sock) < 5


def test_a_pipelined_request_that_stays_incomplete_is_closed(server):
    _, port = server
    second = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    with connection(port, get("/") + second) as client:
        seconds_until_closed(client)  # raises TimeoutError if it stays open


@pytest.mark.slow
@pytest.mark.parametrize("files", ["ulimit -Sn 400"])
@pytest.mark.parametrize("connections", [200])
def test_the_buffered_end_of_a_response_is_not_kept_for_a_reader_that_stops(server):
    """Some of these sizes exceed the kernel's buffers by less than what asyncio buffers without pausing the server."""
    process, port = server
    with contextlib.ExitStack() as opened:
        for size in range(0, 6 << 20, 48 << 10):
            client = opened.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(f"GET /large/{size} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        deadline = time.monotonic() + 30
        while (left := open_connections(process)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left


def open_connections(process):
    return [one for one in psutil.Process(process.pid).net_connections("tcp") if one.raddr]


@pytest.mark.parametrize("connections", [1])
def test_a_busy_server_responds_with_503_at_once(server):
    _, port = server
    with connection(port, get("/slow")) as busy:
        time.sleep(0.2)
        assert b"503" in response_to(port, get("/"))
        assert b"200 OK" in busy.recv(2**16)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [b"", b"G"])
def test_a_reader_that_does_not_read_is_left(server, extra):
    """Also one that sends a piece of its next request."""
    _, port = server
    client = connection(port, get("/endless"))
    time.sleep(0.5)
    client.sendall(extra)
    time.sleep(2)
    # What was on its way is read; without the limit this would never end.
    assert seconds_until_closed(client) < 10


def test_a_socket_that_cannot_be_bound_is_closed():
    before = psutil.Process().num_fds()
    with pytest.raises(ValueError, match=r"--host 203\.0\.113\.1 ") as caught:
        bind_socket("203.0.113.1", 0)
    assert psutil.Process().num_fds() == before, f"{caught} keeps the local variables"
