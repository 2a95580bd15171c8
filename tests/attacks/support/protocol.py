"""Generator of attacks on connections: incomplete, slow, malformed, pipelined, reset and very many."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.attacks.support.attack import PROTOCOL, Attack, HalfClose, Pause, Read, Reset, Send, Step, http_request
from tests.attacks.support.requests import Endpoint

__all__ = ["flood_attacks", "framing_attacks", "slow_attacks"]

_FLOOD = 1_100
_HOLD_S = 4.0
_WAIT_S = 3.0


def framing_attacks(endpoint: Endpoint) -> Iterator[Attack]:
    """Requests whose framing is wrong or ambiguous, and bytes that are not HTTP."""
    body = json.dumps(endpoint.valid).encode()
    head = _head(endpoint)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    one_chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    length = b"Content-Length: %d\r\n" % len(body)
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    messages: dict[str, bytes] = {
        "chunked": chunked + one_chunk,
        "chunked-extension": chunked + b"%x;a=%b\r\n%b\r\n0\r\n\r\n" % (len(body), b"x" * 1000, body),
        "chunked-trailers": chunked + one_chunk[:-2] + b"X-Trailer: a\r\nContent-Length: 1\r\n\r\n",
        "chunked-negative": chunked + b"-1\r\n" + body,
        "chunked-huge": chunked + b"f" * 15 + b"\r\n" + body,
        "chunked-64-bit": chunked + b"f" * 17 + b"\r\n" + body,
        "chunked-hex-prefix": chunked + b"0x5\r\nhello\r\n0\r\n\r\n",
        "chunked-no-hex": chunked + b"zz\r\n" + body,
        "chunked-long-size-line": chunked + b"0" * 100_000 + b"1\r\nx\r\n",
        "chunked-bare-lf": chunked + b"%x\n%b\n0\n\n" % (len(body), body),
        "chunked-one-byte": chunked + b"".join(b"1\r\n%b\r\n" % bytes([byte]) for byte in body) + b"0\r\n\r\n",
        "chunked-empty": chunked + b"0\r\n\r\n",
        "cl-and-te": head + length + b"Transfer-Encoding: chunked\r\n\r\n" + one_chunk + smuggled,
        "te-and-cl": head + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n" + one_chunk + smuggled,
        "te-twice": head + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + one_chunk,
        "te-list": head + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + one_chunk,
        "te-odd-spelling": head + b"Transfer-Encoding: xchunked\r\n\r\n" + one_chunk,
        "te-space-before-colon": head + b"Transfer-Encoding : chunked\r\n\r\n" + one_chunk,
        "te-tab": head + b"Transfer-Encoding:\tchunked\r\n\r\n" + one_chunk,
        "cl-twice": head + length + b"Content-Length: 1\r\n\r\n" + body + smuggled,
        "cl-twice-same": head + length + length + b"\r\n" + body,
        "cl-list": head + b"Content-Length: %d, %d\r\n\r\n" % (len(body), len(body)) + body,
        "cl-negative": head + b"Content-Length: -1\r\n\r\n" + body,
        "cl-plus": head + b"Content-Length: +%d\r\n\r\n" % len(body) + body,
        "cl-400-digits": head + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n" + body,
        "cl-18-digits": head + b"Content-Length: " + b"9" * 18 + b"\r\n\r\n" + body,
        "cl-text": head + b"Content-Length: x\r\n\r\n" + body,
        "cl-hex": head + b"Content-Length: 0x10\r\n\r\n" + body,
        "cl-arabic-digits": head + "Content-Length: \u0663\r\n\r\n".encode() + body,
        "cl-too-small": head + b"Content-Length: 1\r\n\r\n" + body,
        "cl-missing": head + b"\r\n" + body,
        "http-0.9": b"GET /health\r\n\r\n",
        "http-1.0": b"GET /health HTTP/1.0\r\n\r\n",
        "http-1.0-post": head.replace(b"HTTP/1.1", b"HTTP/1.0") + length + b"\r\n" + body,
        "http-1.0-chunked": chunked.replace(b"HTTP/1.1", b"HTTP/1.0") + one_chunk,
        "http-1.2": b"GET /health HTTP/1.2\r\nHost: x\r\n\r\n",
        "http-2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
        "http-9.9": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        "lower-case-version": b"GET /health http/1.1\r\nHost: x\r\n\r\n",
        "no-version": b"GET /health\r\nHost: x\r\n\r\n",
        "only-newlines": b"\r\n" * 20_000,
        "garbage": bytes(range(256)) * 400,
        "nul-bytes": b"\0" * 100_000,
        "tls-hello": bytes.fromhex("16030100f8010000f40303") + b"\x11" * 300,
        "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
        "proxy-protocol": b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        "long-method": b"A" * 100_000,
        "no-end-of-headers": b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000,
        "bare-lf": b"GET /health HTTP/1.1\nHost: x\n\n",
        "bare-cr": b"GET /health HTTP/1.1\rHost: x\r\r",
        "space-in-path": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
        "leading-space": b" GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        "two-hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    }
    for name, message in messages.items():
        # A server may wait for the rest of an incomplete request.
        steps, allowed = (Send(message), Read()), PROTOCOL | {"timeout"}
        yield Attack(f"{endpoint.path} framing {name}", steps, allowed, wait_s=_WAIT_S, structured=False)
    yield from _pipelined(endpoint)


def _pipelined(endpoint: Endpoint) -> Iterator[Attack]:
    (request,) = http_request("POST", endpoint.path, json.dumps(endpoint.valid).encode(), dict(endpoint.headers))
    assert isinstance(request.data, bytes)
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    reads = tuple(Read() for _ in range(4))
    yield _protocol(endpoint, "pipeline 4", Send(request.data + health + request.data + health), *reads)
    yield _protocol(endpoint, "pipeline health-500", Send(health * 500), *(Read() for _ in range(500)))
    yield _protocol(endpoint, "pipeline 20000-unread", Send(health * 20_000), Pause(1.0))
    yield _protocol(endpoint, "pipeline requests-200-reset", Send(request.data * 200), Pause(0.2), Reset())
    yield _protocol(endpoint, "pipeline garbage-after", Send(request.data + b"\0garbage\r\n\r\n"), Read())
    yield _protocol(endpoint, "half-closed", Send(request.data), HalfClose(), Read())
    yield _protocol(endpoint, "half-closed-before", HalfClose(), Read())
    yield _protocol(endpoint, "reset-after-request", Send(request.data), Reset(), count=10)
    yield _protocol(endpoint, "reset-in-header", Send(request.data[:40]), Reset(), count=10)
    yield _protocol(endpoint, "reset-in-body", Send(request.data[:-3]), Reset(), count=10)
    yield _protocol(endpoint, "close-in-body", Send(request.data[:-3]), HalfClose(), Read())
    yield _protocol(endpoint, "connect-and-reset", Reset(), count=50)


def slow_attacks(endpoint: Endpoint) -> Iterator[Attack]:
    """Connections that send or read slowly; each is held for a few seconds and then closed by the attacker."""
    (request,) = http_request("POST", endpoint.path, json.dumps(endpoint.valid).encode(), dict(endpoint.headers))
    assert isinstance(request.data, bytes)
    head = request.data.partition(b"\r\n\r\n")[0]
    declared = _head(endpoint) + b"Content-Length: %d\r\n\r\n" % endpoint.max_body
    yield _protocol(endpoint, "slow header", Send(head[:40], _HOLD_S / 40), Reset(), count=100)
    yield _protocol(endpoint, "slow body", Send(declared), Send(b"x" * 40, _HOLD_S / 40), Reset(), count=100)
    yield _protocol(
        endpoint, "slow large-body", Send(declared + b"x" * (256 << 10)), Pause(_HOLD_S), Reset(), count=100
    )
    yield _protocol(endpoint, "slow no-reader", Send(request.data * 20), Pause(_HOLD_S), Reset(), count=20)
    yield _protocol(endpoint, "slow keep-alive", Send(request.data), Read("POST"), Pause(_HOLD_S), Reset(), count=20)


def flood_attacks(endpoint: Endpoint) -> Iterator[Attack]:
    """More connections than the server holds: idle, in the middle of a header, in the middle of a body."""
    declared = _head(endpoint) + b"Content-Length: 1000\r\n\r\n{"
    yield _protocol(endpoint, "flood idle", Pause(_HOLD_S), Reset(), count=_FLOOD)
    yield _protocol(endpoint, "flood header", Send(b"POST /"), Pause(_HOLD_S), Reset(), count=_FLOOD)
    yield _protocol(endpoint, "flood body", Send(declared), Pause(_HOLD_S), Reset(), count=_FLOOD)


def _protocol(endpoint: Endpoint, name: str, *steps: Step, count: int = 1) -> Attack:
    return Attack(f"{endpoint.path} {name}", steps, PROTOCOL, structured=False, count=count)


def _head(endpoint: Endpoint) -> bytes:
    """Request line and headers without those of the body's length and without the empty line."""
    lines = [f"POST {endpoint.path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in endpoint.headers.items()]
    return "".join(f"{line}\r\n" for line in lines).encode()
